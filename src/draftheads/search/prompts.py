"""Questions on which trees are tuned: of our own wording, of the kinds and lengths of a chat's first turns.

The kinds take turns, so that the first few are as fair a sample as all of them.
"""

from itertools import chain

_KINDS = {
    "writing": (
        (
            "Write a short letter from a lighthouse keeper to the engineer who is about to replace the lamp with an "
            "automatic one. Keep it warm, a little proud, and under 200 words."
        ),
        (
            "Draft the opening page of a detective story set in a small mountain bakery where the sourdough starter "
            "has gone missing. The first sentence should already tell us who cared most about it."
        ),
        (
            "Our neighbourhood library will close on Mondays from next month to save heating costs. Write a notice "
            "for the front door that explains the change, says where people can return books on that day, and sounds "
            "friendly rather than official."
        ),
        (
            "Compose a toast for my grandparents' fiftieth wedding anniversary. They met while repairing the same "
            "bicycle, raised four children on a ferry-boat captain's pay and still argue about how to make soup. "
            "About two minutes when read aloud."
        ),
        (
            "Write a product description for a hand-made wooden desk lamp with a paper shade. Give three short "
            "paragraphs: what it looks like, how it is made, and who it is for. Avoid the words 'unique' and "
            "'perfect'."
        ),
        (
            "Describe an abandoned railway station in late autumn so that a reader can smell and hear it. Use no "
            "people and no dialogue, and let something small move in the last sentence."
        ),
        (
            "I have to turn down a job offer from a company that I like because the commute would be too long. Help "
            "me write a polite reply that leaves the door open for remote work in the future."
        ),
        (
            "Write an outline for a ten-minute podcast episode about why so many people give up on learning an "
            "instrument as adults. Include a hook, three main points with one example each, and a closing question "
            "for the listeners."
        ),
    ),
    "role-play": (
        (
            "You are the navigator of a merchant ship in the year 1620. A young sailor asks you how you find the way "
            "when clouds hide the stars for a week. Answer in your own voice."
        ),
        (
            "Pretend to be a retired chess coach who explains everything in life by way of openings and endgames. I "
            "am nervous about moving to a new city. What do you tell me?"
        ),
        (
            "Act as the tour guide of a museum of failed inventions. Welcome the group, then present the first "
            "exhibit, an umbrella that opens only in sunshine, and take one sceptical question from a visitor."
        ),
        (
            "Imagine you are a cat that has just been asked to write a performance review of its human. Cover feeding "
            "times, lap quality and general attitude. Stay dignified throughout."
        ),
        (
            "Play the part of a patient sommelier who works in a shop for mineral water instead of wine. A customer "
            "says that all water tastes the same. Convince her."
        ),
        (
            "You are the last speaker of a language that has forty words for rain. A radio reporter wants to know "
            "what is lost when a language disappears. Give your answer, and teach her three of the words."
        ),
        (
            "Take the role of a job interviewer at a company that builds playgrounds. Ask me one question at a time, "
            "wait for my answers, and start now with something that is harder than it sounds."
        ),
        (
            "Speak as an old river that has watched a village grow into a city. Tell the mayor, who plans to put you "
            "into a pipe below the main street, what you think of it."
        ),
    ),
    "reasoning": (
        (
            "Five friends finished a cooking contest without ties. Ana was placed ahead of Ben but behind Carla. "
            "Dmitri was placed directly behind Ben, and Eva was not last. Who was last, and what can be said about "
            "Eva's place? Explain step by step."
        ),
        (
            "A shop sells candles in boxes of six and boxes of eleven and never opens a box. Can a customer buy "
            "exactly forty-nine candles? Explain how you know, whichever way the answer goes."
        ),
        (
            "All of the keys on this ring open some door in the house. Some doors in the house have no lock. Does it "
            "follow that some key on the ring opens nothing? Does it follow that every lock has a key on the ring? "
            "Give reasons."
        ),
        (
            "My train was due at 9:40 but came a quarter of an hour late. The journey should take 50 minutes, and the "
            "driver made up six minutes on the way. I then walked twelve minutes to the office. Was I in time for "
            "the meeting at 11:00?"
        ),
        (
            "Three boxes are labelled 'apples', 'pears' and 'both', and every label is wrong. You may take one fruit "
            "out of one box without looking inside. From which box do you take it, and how do you then name all three "
            "boxes correctly?"
        ),
        (
            "In an office, everybody who drinks coffee also drinks water, nobody who drinks tea drinks coffee, and "
            "Priya drinks no water. What can you conclude about Priya and coffee? What about Priya and tea? State "
            "which rule you use each time."
        ),
        (
            "A gardener notices that the plants by the south window grow faster than those by the north window and "
            "concludes that the watering can kept there must hold better water. Name two other explanations and "
            "describe a simple test that would tell them apart."
        ),
        (
            "If the day after tomorrow is two days before Thursday, what day was it yesterday? Write down each step "
            "so that somebody else can check it."
        ),
    ),
    "mathematics": (
        (
            "A rectangular garden is three metres longer than it is wide, and its area is 88 square metres. How long "
            "is the fence around it? Show how you set up the equation."
        ),
        (
            "A bag holds five green and seven yellow marbles. Two are drawn without putting the first one back. What "
            "is the probability that both have the same colour? Give the answer as a fraction and as a percentage."
        ),
        "Solve for x: 3(2x - 5) = 4x + 9. Then check your result by putting it back into the equation.",
        (
            "A bakery raised the price of a loaf by 20 percent and, when customers complained, lowered the new price "
            "by 20 percent. Is the loaf now cheaper, dearer or the same as at first, and by how much?"
        ),
        (
            "Find the sum of all whole numbers from 1 to 200 that are divisible by 3 but not by 5. Explain the method "
            "rather than listing the numbers."
        ),
        (
            "A cyclist rides uphill at 12 kilometres an hour and comes back down the same road at 36 kilometres an "
            "hour. What is her average speed for the whole trip? Why is it not 24?"
        ),
        (
            "What is the derivative of g(t) = t squared times the natural logarithm of t, and for which positive t "
            "does g have its smallest value?"
        ),
        (
            "A cylindrical tank with a radius of 1.5 metres is filled at 40 litres a minute. How fast does the water "
            "level rise in centimetres a minute, and how long does it take until the water is two metres deep?"
        ),
    ),
    "coding": (
        (
            "Write a Python function that takes a list of intervals given as (start, end) pairs and merges those that "
            "overlap. Add a docstring with one example and explain how long it takes for n intervals."
        ),
        (
            "I have a CSV file of orders with the columns date, customer and amount. Show me how to print the total "
            "amount per customer and month with nothing but Python's standard library."
        ),
        (
            "What does this function do, and for which input does it fail?\n\n"
            "def f(words):\n    best = words[0]\n    for word in words:\n        if len(word) > len(best):\n"
            "            best = word\n    return best\n\n"
            "Rewrite it so that it deals with that input in a sensible way."
        ),
        (
            "Write a SQL query that finds, for every department, the employee who was hired most recently. The table "
            "is called staff and has the columns id, name, department and hired_on. Two people may have been hired on "
            "the same day."
        ),
        (
            "Implement a queue with two stacks in Java. Provide the methods add, remove and isEmpty, and say what "
            "each of them costs on average."
        ),
        (
            "Explain the difference between a shallow and a deep copy in JavaScript with a short example in which the "
            "difference causes a bug. Then fix the bug."
        ),
        (
            "Write a bash script that looks for all files larger than 100 megabytes below a given folder, prints them "
            "sorted by size and asks before deleting each one. It should cope with spaces in file names."
        ),
        (
            "Write a small class in Python for a cache that keeps at most n results and forgets the one that was not "
            "used for the longest time. No imports, please, and include three assertions as a test."
        ),
    ),
    "extraction": (
        (
            "List the name, the date and the place of every event in the following newsletter as a table with three "
            "columns.\n\n"
            "The spring season of the Harbour Society begins on 4 April with the choir's open rehearsal in the Old "
            "Customs House. Two weeks later, on 18 April, members are invited to the Seed Exchange in the community "
            "garden behind the station, where the bee-keepers will bring honey from last year. The annual meeting "
            "takes place on 9 May in Room 12 of the town hall; please bring your membership card. We close the season "
            "on 30 May with the lantern walk, which starts at the north pier as soon as it is dark."
        ),
        (
            'Read the note and return a JSON object with the keys "patient", "complaint", "medicine", "dose" and '
            '"next_visit".\n\n'
            "Mr Halvorsen came in this morning because his left knee has been swollen since he slipped on the cellar "
            "stairs ten days ago. There is no fever and he can bend the joint, though not all the way. I asked him to "
            "rest it, to cool it three times a day and to take ibuprofen, 400 milligrams after breakfast and after "
            "dinner, for one week at most. He is not to drive the delivery van until the swelling has gone. We will "
            "look at the knee again on Tuesday the 14th, and earlier if it turns hot or red."
        ),
        (
            "Which claims in this advertisement could be checked by measuring something, and which could not? Make "
            "two lists.\n\n"
            "Meet the Breeza 3, the fan that changes how summer feels. Its seven blades move 1,200 cubic metres of "
            "air an hour and yet make no more noise than a whisper: 28 decibels at two metres. The motor needs only "
            "22 watts, less than half of what our last model used. Designers love its calm lines, and so will you. "
            "Fold it flat, put it under the bed and forget it until June. With a five-year guarantee and a cable of "
            "three metres, the Breeza 3 is simply the friendliest machine in your home."
        ),
        (
            "Take all amounts of money from the text below, convert nothing, and write one line for each with the "
            "amount, who paid and what for.\n\n"
            "The club's treasurer reported that the year had been a mixed one. Subscriptions brought in 3,450 euros "
            "from 115 members, and the town gave a grant of 800 euros for the youth group. On the other side, the "
            "club paid 1,920 euros to Lindgren Brothers for the new roof of the boat shed and 310 euros to the "
            "insurance company. A former member, Ms Okafor, donated 500 euros, which the committee spent at once on "
            "life jackets. The summer party cost 642 euros and earned 590."
        ),
        (
            "Find every person in the passage, together with their occupation and the person they answer to, if it is "
            "mentioned.\n\n"
            "When the observatory opened again in September, Director Amara Diallo had only a small team. Jonas "
            "Weber, the technician, was the one who kept the dome turning; he reported to the head of operations, Li "
            "Na, who in turn discussed every expense with the director. Two astronomers, Petra Novak and Samuel "
            "Reyes, shared the night shifts and one desk. Samuel also taught at the college in the valley, where he "
            "answered to its dean, Professor Hughes. The cook, known to all as Uncle Beto, answered to nobody."
        ),
        (
            "Here is a review of a hotel. Give scores from 1 to 5 for the room, the food, the staff and the location "
            'as far as the text supports them, write "unknown" otherwise, and quote the words that each score rests '
            "on.\n\n"
            "We stayed three nights at the Pinewood. The walk from the bus stop takes twenty minutes uphill, and "
            "there is no shop anywhere near, so bring what you need. Our room was spotless and larger than in the "
            "pictures, although the shower never got properly warm. The young man at the desk went out of his way to "
            "find a cot for our baby and even carried it up himself. We did not eat there, since the kitchen was "
            "being rebuilt during our stay."
        ),
        (
            "Sort the steps of the following recipe into those that can be done the day before and those that cannot. "
            "Keep the original wording of each step.\n\n"
            "Soak the beans overnight in cold water. Cook them with a bay leaf until they are soft, which takes about "
            "an hour, and let them cool in their water. Chop two onions and keep them covered in the refrigerator. "
            "Half an hour before the meal, fry the onions slowly in olive oil, add the beans with a cup of their "
            "water and a spoon of vinegar, and warm it all through. Tear the parsley by hand just before serving. "
            "Toast the bread last, so that it comes to the table hot."
        ),
        (
            "From this log, name the device that failed, the time at which it first showed a problem, the time at "
            "which it stopped, and the probable cause. Answer in one short sentence each.\n\n"
            "07:58 pump A started, pressure normal. 08:10 pump B started, pressure normal. 08:41 pump B: temperature "
            "71 degrees, limit is 85. 09:02 filter 3 changed by the morning shift. 09:15 pump B: flow 12 percent "
            "below target. 09:20 pump A: temperature 64 degrees. 09:33 pump B: temperature 83 degrees, flow 31 "
            "percent below target. 09:36 pump B: temperature above limit, switched off. 09:50 inspection: inlet of "
            "pump B blocked by a piece of packing foil. 10:20 inlet cleaned, pump B started, pressure normal."
        ),
    ),
    "science and technology": (
        (
            "Why is the sky blue by day and red near the horizon in the evening? Explain it to a curious twelve-year-"
            "old without formulas, and mention one thing that people often get wrong about it."
        ),
        (
            "How does a heat pump move warmth from a cold garden into a warm house without breaking the laws of "
            "physics? Describe the cycle in four steps and say what limits its efficiency on very cold days."
        ),
        (
            "What happens between pressing a key on a keyboard and seeing the letter on the screen? Walk me through "
            "the main stages in the order in which they take place."
        ),
        (
            "Describe how vaccines train the immune system. What is the role of memory cells, and why do some "
            "vaccines need a booster while others last for a lifetime?"
        ),
        (
            "Compare lithium-ion batteries with pumped-storage hydroelectricity as ways to keep electricity for "
            "later. Consider cost, lifetime, reaction time and the places where each can be built."
        ),
        (
            "What is a hash function, and why can it be used to notice that a file was changed? Explain what a "
            "collision is and whether I should worry about one."
        ),
        (
            "Plates of the Earth's crust drift only a few centimetres a year. How do scientists measure something so "
            "slow, and what evidence did they have before there were satellites?"
        ),
        (
            "Why does ice float on water while most solids sink in their own liquid? Explain the reason at the level "
            "of molecules and name two consequences for life in lakes."
        ),
    ),
    "humanities": (
        (
            "How did the printing press change who could take part in religious and political debates in Europe? Give "
            "two developments that it made easier and one that it is often credited with unfairly."
        ),
        (
            "Explain the difference between a moral rule that tells us what to do and a virtue that tells us what "
            "kind of person to be. Use the example of telling a friend an unwelcome truth."
        ),
        (
            "What made the cities along the Silk Road rich, and why did many of them decline? Write a summary of "
            "about 200 words for visitors of an exhibition."
        ),
        (
            "Why do so many cultures have a story about a great flood? Present three explanations that scholars have "
            "offered, and say what kind of evidence would support each of them."
        ),
        (
            "Compare how ancient Athens and the Roman Republic decided who was allowed to vote and to hold office. "
            "Which groups were left out in both?"
        ),
        (
            "What is meant by an unreliable narrator in a novel? Describe two techniques by which writers let readers "
            "notice that they cannot trust the voice that tells the story."
        ),
        (
            "A town wants to rename a street that honours a merchant who made his money in the slave trade. Set out "
            "the strongest arguments for renaming it, for keeping the name, and for a third way."
        ),
        (
            "How did the arrival of railways change people's sense of time and distance in the nineteenth century? "
            "Mention the introduction of standard time and one effect on everyday life that is easily forgotten."
        ),
    ),
}
CALIBRATION_PROMPTS: tuple[str, ...] = tuple(chain.from_iterable(zip(*_KINDS.values(), strict=True)))

// The page: its controls, the conversation, and who answers. The conversation is kept here only, and a reload drops it.

import { Answer, element, verdictOn } from './answer.js';
import { listModels, Problem, streamChat } from './api.js';

const RETRY_MILLISECONDS = 2000; // while the server loads its model
const NEAR_END_PIXELS = 60; // from the end of the log: then it follows the text

const at = (id) => document.getElementById(id);
const log = at('log');
const turns = []; // { question, answer, node, answers }; answer is '' until there is one
let models = [];
let running = null; // AbortController of the answer under way
// In memory and not in sessionStorage: no script but this one needs the key, and it must not outlive the page.
let key = '';

// --- the server's models ---

async function connect() {
  try {
    models = await listModels(key);
  } catch (problem) {
    if (problem.status === 401) askForKey(problem.message);
    else showAlert(problem.status === 503 ? 'The server is loading its model …' : problem.message);
    if (problem.status !== 401) setTimeout(connect, RETRY_MILLISECONDS);
    return;
  }
  showAlert('');
  const heads = models.map((model) => model.head ?? 'no head');
  at('head').replaceChildren(
    ...models.map((model, i) => new Option(isUnique(heads, heads[i]) ? heads[i] : `${heads[i]} (${model.id})`, model.id)),
  );
  chooseModel();
}

function isUnique(values, value) {
  return values.indexOf(value) === values.lastIndexOf(value);
}

function chosen() {
  return models.find((model) => model.id === at('head').value) ?? null;
}

function chooseModel() {
  const model = chosen();
  at('model').textContent = model ? model.base : '';
  showState();
}

function askForKey(sentence) {
  at('key-field').hidden = at('key-note').hidden = false;
  at('settings').open = true;
  showAlert(sentence);
  at('key').focus();
}

// --- what the controls allow ---

function showState() {
  const model = chosen();
  const drafts = Boolean(model?.head);
  for (const id of ['tree-field', 'plain-field', 'compare-field']) at(id).hidden = model !== null && !drafts;
  at('thinking-field').hidden = !model?.thinks;
  for (const words of document.querySelectorAll('.about-drafts')) words.hidden = model !== null && !drafts;
  for (const example of document.querySelectorAll('.examples button')) example.disabled = model === null;
  at('head').disabled = model === null;
  at('plain').disabled = !drafts || compares();
  at('compare').disabled = !drafts;
  at('tree').disabled = !drafts || isPlain();
  at('send').disabled = model === null;
  at('send').hidden = running !== null;
  at('stop').hidden = running === null;
  at('clear').disabled = turns.length === 0;
  at('welcome').hidden = turns.length > 0;
  log.setAttribute('aria-busy', String(running !== null));
}

function compares() {
  return at('compare').checked && Boolean(chosen()?.head);
}

function isPlain() {
  return at('plain').checked && !compares();
}

function showAlert(sentence) {
  at('alert').textContent = sentence;
  at('alert').hidden = !sentence;
}

function settingsAreValid() {
  const wrong = [at('temperature'), at('max-tokens')].find((input) => !input.checkValidity());
  if (!wrong) return true;
  at('settings').open = true; // a message beside a hidden field is not seen
  wrong.reportValidity();
  return false;
}

// --- asking and answering ---

async function ask(question) {
  if (running || !question.trim() || !chosen() || !settingsAreValid()) return false;
  const turn = { question: question.trim(), answer: '', node: null, answers: null };
  turn.answers = element('div', 'answers');
  turn.node = element('section', 'turn', element('p', 'question', turn.question), turn.answers);
  turns.push(turn);
  log.append(turn.node);
  await answer(turn);
  return true;
}

async function answer(turn) {
  running = new AbortController();
  turn.answer = '';
  turn.answers.replaceChildren();
  for (const old of log.querySelectorAll('.tools .again')) old.remove();
  turn.node.querySelector('.verdict')?.remove();
  turn.node.querySelector('.tools')?.remove();
  showAlert('');
  showState();
  log.scrollTop = log.scrollHeight;
  at('status').textContent = 'The model answers.';
  try {
    const answers = await (compares() ? compared(turn) : single(turn));
    turn.answer = answers.at(-1).text;
    addTools(turn);
    at('status').textContent = `${endWords(answers.at(-1))} ${turn.node.querySelector('.verdict')?.textContent ?? ''}`;
  } finally {
    running = null;
    showState();
    scrollAlong(true);
  }
}

async function single(turn) {
  const shown = new Answer();
  turn.answers.className = 'answers';
  turn.answers.append(shown.node);
  await stream(shown, requestFor(turn, { plain: isPlain() }));
  return [shown];
}

/** Both answers, one after the other so that neither slows the other down. */
async function compared(turn) {
  const plain = new Answer({ title: 'Without drafting', showsFirst: false });
  const drafted = new Answer({ title: `With ${chosen().head}`, showsFirst: false });
  turn.answers.className = 'answers both';
  turn.answers.append(plain.node, drafted.node);
  const seed = Math.floor(Math.random() * 2 ** 31); // with the same seed, drawn texts are equal, too
  const requests = [requestFor(turn, { plain: true, seed }), requestFor(turn, { plain: false, seed })];
  await stream(plain, requests[0]);
  if (isWhole(plain)) await stream(drafted, requests[1]);
  else drafted.end();
  if (isWhole(plain) && isWhole(drafted)) turn.node.append(element('p', 'verdict', verdictOn(plain, drafted)));
  return [plain, drafted];
}

function isWhole(shown) {
  return shown.finish === 'stop' || shown.finish === 'length';
}

function endWords(shown) {
  if (shown.finish === 'stopped') return 'The answer was stopped.';
  return isWhole(shown) ? `The answer is finished: ${shown.meter.tokens} tokens.` : 'There is no answer.';
}

function requestFor(turn, { plain, seed = null }) {
  const model = chosen();
  const before = turns.slice(0, turns.indexOf(turn)).filter((earlier) => earlier.answer);
  const system = at('system').value.trim();
  const messages = [
    ...(system ? [{ role: 'system', content: system }] : []),
    ...before.flatMap((earlier) => [
      { role: 'user', content: earlier.question },
      { role: 'assistant', content: earlier.answer },
    ]),
    { role: 'user', content: turn.question },
  ];
  const nodes = plain ? 0 : Number(at('tree').value) || null;
  return {
    model: model.id,
    // a model without a chat template continues the text, as it does on the terminal
    ...(model.chat ? { messages } : { prompt: messages.map(({ content }) => content).join('\n') }),
    stream: true,
    stream_options: { include_usage: true, include_draft: true },
    temperature: at('temperature').valueAsNumber,
    max_tokens: at('max-tokens').valueAsNumber,
    ...(model.head && nodes !== null ? { draft_nodes: nodes } : {}),
    ...(seed === null ? {} : { seed }),
    ...(model.thinks && at('thinking').value ? { reasoning_effort: at('thinking').value } : {}),
  };
}

async function stream(shown, body) {
  const { signal } = running;
  shown.begin();
  try {
    for await (const chunk of streamChat(body, { key, signal })) {
      const atEnd = isAtEnd();
      shown.push(chunk);
      scrollAlong(atEnd);
    }
    const note = 'The answer reached the limit of tokens. “Max tokens” in the settings raises it.';
    shown.end(shown.finish === 'length' ? { note } : {});
  } catch (error) {
    if (signal.aborted) {
      shown.finish = 'stopped';
      shown.end({ note: 'Stopped.' });
      return;
    }
    if (!(error instanceof Problem)) console.error(error);
    shown.finish = 'failed';
    shown.end({ problem: error instanceof Problem ? error.message : 'The server sent something that this page cannot read.' });
    if (error.status === 401) askForKey(error.message);
  }
}

function addTools(turn) {
  const copy = element('button', '', 'Copy');
  copy.addEventListener('click', async () => {
    await navigator.clipboard.writeText(turn.answer);
    copy.textContent = 'Copied';
    setTimeout(() => { copy.textContent = 'Copy'; }, 1500);
  });
  const again = element('button', 'again', turn.answer ? 'Regenerate' : 'Try again');
  again.addEventListener('click', () => {
    if (!running && settingsAreValid()) answer(turn);
    at('question').focus();
  });
  for (const button of [copy, again]) button.type = 'button';
  copy.hidden = !turn.answer || !navigator.clipboard; // browsers have no clipboard for pages without https
  turn.node.append(element('div', 'tools', copy, again));
}

// --- the log follows its end, unless the reader has scrolled up ---

function isAtEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PIXELS;
}

function scrollAlong(wasAtEnd) {
  if (wasAtEnd) log.scrollTop = log.scrollHeight;
}

// --- controls ---

async function send() {
  const field = at('question');
  const question = field.value;
  if (running) return;
  field.value = '';
  if (!(await ask(question)) && !field.value) field.value = question;
}

at('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  send();
});
at('question').addEventListener('keydown', (event) => {
  // while an input method composes a character, Enter belongs to it
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') running?.abort();
});
at('stop').addEventListener('click', () => {
  running?.abort();
  at('question').focus();
});
at('clear').addEventListener('click', () => {
  running?.abort();
  for (const turn of turns.splice(0)) turn.node.remove();
  showState();
  at('question').focus();
});
for (const example of document.querySelectorAll('.examples button')) {
  example.addEventListener('click', () => {
    at('question').focus();
    ask(example.textContent);
  });
}
at('settings-form').addEventListener('submit', (event) => event.preventDefault()); // Enter in a field
at('head').addEventListener('change', chooseModel);
for (const id of ['plain', 'compare']) at(id).addEventListener('change', showState);
at('key').addEventListener('change', () => {
  key = at('key').value.trim();
  connect();
});
showState();
connect();

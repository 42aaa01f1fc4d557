// One answer on the page: its text, with accepted draft tokens in colour, and its figures. Text of the model is only
// ever added as text, never as HTML.

/** An element with a class and children; strings become text. */
export function element(name, className = '', ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** The figures of an answer, from the times of its chunks. */
class Meter {
  constructor() {
    this.start = performance.now();
    this.first = null; // when the first token came
    this.last = null;
    this.events = 0; // the first one is the prompt's pass, each other one a step
    this.tokens = 0; // until the server counts them: pieces of text
    this.perStep = null;
  }

  add(pieces) {
    this.last = performance.now();
    this.first ??= this.last;
    this.events += 1;
    this.tokens += Math.max(1, pieces.length);
    if (this.events > 1) this.perStep = (this.tokens - 1) / (this.events - 1);
  }

  count(usage) {
    this.tokens = usage.completion_tokens;
    if (usage.draft?.steps) this.perStep = usage.draft.tokens_per_step;
  }

  /** Tokens per second after the first token, so that reading the prompt does not count; null if unknown. */
  get perSecond() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 && this.tokens > 1 ? (this.tokens - 1) / seconds : null;
  }

  get firstSeconds() {
    return this.first === null ? null : (this.first - this.start) / 1000;
  }
}

/** Adds text to a node, in colour if it was drafted. */
function append(node, text, drafted) {
  if (!text) return;
  const className = drafted ? 'drafted' : '';
  const last = node.lastChild;
  if (last?.className === className) last.append(text);
  else node.append(element('span', className, text));
}

/** Shows one answer while it arrives. */
export class Answer {
  /** @param title of the answer; empty: none. @param showsFirst whether to show the time to the first token. */
  constructor({ title = '', showsFirst = true } = {}) {
    this.text = '';
    this.thought = '';
    this.finish = null; // stop, length or stopped; null: not finished
    this.meter = null;
    this.showsFirst = showsFirst;
    this.textNode = element('div', 'text');
    this.figures = element('dl', 'figures');
    this.node = element('article', 'answer waits', ...(title ? [element('h3', '', title)] : []), this.textNode, this.figures);
    this.node.setAttribute('aria-label', title || 'Answer');
  }

  begin() {
    this.meter = new Meter();
    this.node.classList.replace('waits', 'busy');
  }

  /** Adds a chunk of the stream. */
  push(chunk) {
    const choice = chunk.choices[0];
    const thought = choice?.delta?.reasoning_content ?? '';
    const content = choice?.delta?.content ?? choice?.text ?? ''; // completions have a text
    if (choice?.pieces || thought || content) {
      const pieces = choice.pieces ?? [[thought || content, false]];
      this.meter.add(pieces);
      this.thought += thought;
      this.text += content;
      for (const [text, drafted] of pieces) append(thought ? this.#thoughtNode() : this.textNode, text, drafted);
    }
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (chunk.usage) this.meter.count(chunk.usage);
    this.#showFigures();
  }

  /** The answer has ended, by itself or because it was stopped or failed. */
  end({ problem = '', note = '' } = {}) {
    this.node.classList.remove('busy', 'waits');
    if (problem) {
      const words = element('p', 'problem', problem);
      words.setAttribute('role', 'alert');
      this.node.append(words);
    }
    if (note) this.node.append(element('p', 'note', note));
  }

  /** Above the text, once the model thinks. */
  #thoughtNode() {
    if (!this.node.querySelector('.thought')) {
      const thought = element('details', 'thought', element('summary', '', 'Thought'), element('div', 'text'));
      thought.open = true;
      this.textNode.before(thought);
    }
    return this.node.querySelector('.thought .text');
  }

  #showFigures() {
    const { perStep, perSecond, firstSeconds, tokens } = this.meter;
    const pairs = [
      ['tokens/step', perStep?.toFixed(2)],
      ['tokens/s', perSecond?.toFixed(1)],
      ['s to the first token', this.showsFirst ? firstSeconds?.toFixed(2) : null],
      [tokens === 1 ? 'token' : 'tokens', tokens || null],
    ].filter(([, value]) => value != null);
    this.figures.replaceChildren(
      ...pairs.map(([name, value]) => element('div', '', element('dt', '', name), element('dd', '', String(value)))),
    );
  }
}

/** The sentence under two answers to the same prompt. */
export function verdictOn(plain, drafted) {
  const [one, other] = [plain, drafted].map((answer) => (answer.thought ?? '') + answer.text);
  const same = one === other;
  let place = 0;
  while (one[place] === other[place] && !same) place += 1;
  const texts = same
    ? 'The texts are equal.'
    : `The texts differ after ${place} characters: in 16-bit formats, near-ties between tokens can end differently.`;
  const [slow, fast] = [plain.meter.perSecond, drafted.meter.perSecond];
  if (!slow || !fast) return texts;
  const compared = fast < slow ? 'slower here' : `${(fast / slow).toFixed(2)} times as fast`;
  return `${texts} Drafting is ${compared}: ${fast.toFixed(1)} instead of ${slow.toFixed(1)} tokens/s.`;
}

// The server's API: its models, streamed answers, and its errors in words.

/** An error with a sentence for the reader: what happened and what to do. */
export class Problem extends Error {
  constructor(sentence, { status = 0 } = {}) {
    super(sentence);
    this.status = status;
  }
}

/** The served models: [{ id, head, base, chat, thinks }]; those without chat continue texts. */
export async function listModels(key) {
  const response = await send('v1/models', { headers: headersWith(key) });
  const { data } = await response.json();
  return data.map(({ id, draftheads: { head = null, base = id, chat = true, thinks = false } = {} }) => ({ id, head, base, chat, thinks }));
}

/** Yields the chunks of a streamed answer to a chat, or to the prompt of a completion. Aborting the signal closes the connection, which stops the server, too. */
export async function* streamChat(body, { key, signal }) {
  const headers = { ...headersWith(key), 'Content-Type': 'application/json' };
  const response = await send(body.messages ? 'v1/chat/completions' : 'v1/completions', { method: 'POST', headers, body: JSON.stringify(body), signal });
  let ended = false; // after it the connection is still read to its end: then the server has finished, too
  for await (const data of events(response.body, signal)) {
    if (data === '[DONE]') {
      ended = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Problem(sentenceOf(chunk.error.message));
    yield chunk;
  }
  if (!ended) throw new Problem('The connection ended before the answer did. Is the server still running? Then try again.');
}

function headersWith(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: 'no-store', ...options });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    if (options.headers?.Authorization && error instanceof TypeError && /headers|ISO-8859-1|byte/i.test(error.message)) {
      throw new Problem('The API key has characters that a key cannot have. Enter it again.', { status: 401 });
    }
    throw new Problem('The server does not answer. Start it again with “draftheads serve”, then try again.');
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  const { status } = response;
  let message = `The server answered with status ${status}.`;
  let code = null;
  try {
    const { error } = await response.json();
    message = sentenceOf(error.message);
    code = error.code;
  } catch { /* not from our server: a proxy's page */ }
  if (status === 401) message = `${code === 'invalid_api_key' ? 'The API key is wrong.' : 'This server needs an API key.'} Enter it in the settings.`;
  if (status === 429) message = `The server is busy. Try again in ${response.headers.get('Retry-After') ?? 'a few'} seconds.`;
  if (code === 'context_length_exceeded') message += ' Clear the conversation, or ask for fewer tokens.';
  return new Problem(message, { status });
}

/** With a capital letter and a full stop. */
function sentenceOf(message) {
  const text = String(message);
  const first = /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

/** Yields the data of server-sent events. */
async function* events(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      return; // the connection broke: the caller misses the end
    }
    if (part.done) return;
    const blocks = (rest + part.value).split('\n\n');
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith('data: ')) yield block.slice('data: '.length);
    }
  }
}

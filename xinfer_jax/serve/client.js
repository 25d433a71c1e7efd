// What the page asks of the server: the key, the model, the events of an answer. page.js has the state.

class Problem extends Error {}

// A response that is ok. Where a key is missing or wrong, asks for one and tries again.
async function call(path, body, signal) {
  for (let tried = false; ; tried = true) {
    const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The server does not answer.");
    }
    if (response.ok) return response;
    if (response.status !== 401) throw new Problem(await why(response));
    if (!await askForKey(tried && key)) throw new Problem("The server needs a key, and none was given.");
    signal?.throwIfAborted();
  }
}

async function why(response) {
  try { return (await response.json()).error.message; } catch { return `The server answered ${response.status}.`; }
}

function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    $("keys-why").textContent = wrong ? "The server does not accept this key. Give another one."
      : "This server answers only with a key. It is kept until you close or reload the page.";
    $("key").value = "";
    $("keys").addEventListener("close", () => { asking = null; resolve($("keys").returnValue === "use"); },
      { once: true });
    $("keys").returnValue = "";
    $("keys").showModal();
    $("key").focus();
  });
  return asking;
}

// Learns the model's name, and whether it has a chat template.
async function learn() {
  model = (await (await call("v1/models")).json()).data[0].id;
  $("model").textContent = document.title = model;
  plain = (await (await call("tokenizer_info")).json()).chat_template === null;
  showKind();
}

// The same, again until the model is loaded.
async function meet() {
  if (plain !== null) return;
  try {
    await learn();
  } catch (error) {
    $("model").textContent = model ? `${model}: ${error.message}` : error.message;
    if (!error.message.includes("key")) setTimeout(meet, RETRY_MS);
  }
}

function showKind() {
  document.body.classList.toggle("plain", plain);
  $("system-label").hidden = plain;
  $("ask").placeholder = plain ? "Text to continue" : "Message";
  $("ask").setAttribute("aria-label", plain ? "Text to continue" : "Your message");
  if (plain) $("hint").textContent = "This model has no chat template: it continues the text that you give.";
  render();
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Problem("The connection ended before the answer did.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

function bodyOf(exchange) {
  const system = $("system").value.trim(), temperature = $("temperature").value, most = $("most").value;
  const body = { model, stream: true, stream_options: { include_usage: true } };
  if (plain) Object.assign(body, { prompt: exchange.ask + exchange.text, max_tokens: PLAIN_TOKENS });
  else {
    const answered = talk.slice(0, talk.indexOf(exchange)).filter((earlier) => earlier.text);
    body.messages = system ? [{ role: "system", content: system }] : [];
    for (const { ask, text } of answered) {
      body.messages.push({ role: "user", content: ask }, { role: "assistant", content: text });
    }
    body.messages.push({ role: "user", content: exchange.ask });
  }
  if (temperature !== "") body.temperature = Number(temperature);
  if (most !== "") body.max_tokens = Number(most);
  return JSON.stringify(body);
}


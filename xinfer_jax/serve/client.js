// Requests to the server: the key, the model, the events of an answer. page.js has the state.

class PageError extends Error {}

const NUMBERS = { temperature: "temperature", top_p: "top_p", most: "max_tokens", seed: "seed" }; // id: field

// Returns a response that is ok. If the key is missing or wrong, asks the user for one and tries again.
async function request(path, body, signal) {
  for (let tried = false; ; tried = true) {
    const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new PageError("The server does not answer.");
    }
    if (response.ok) return response;
    if (response.status !== 401) throw new PageError(await errorMessage(response));
    if (!await promptForKey(tried && key)) throw new PageError("The server needs a key, and none was given.");
    signal?.throwIfAborted();
  }
}

async function errorMessage(response) {
  try { return (await response.json()).error.message; } catch { return `The server answered ${response.status}.`; }
}

function promptForKey(wrong) {
  keyPrompt ??= new Promise((resolve) => {
    $("keys-why").textContent = wrong ? "The server does not accept this key. Give another one."
      : "This server needs a key. The page forgets it when you close or reload it.";
    $("key").value = "";
    $("keys").addEventListener("close", () => { keyPrompt = null; resolve($("keys").returnValue === "use"); },
      { once: true });
    $("keys").returnValue = "";
    $("keys").showModal();
    $("key").focus();
  });
  return keyPrompt;
}

// Gets the model's name, and whether it has a chat template.
async function fetchModelInfo() {
  const [card] = (await (await request("v1/models")).json()).data;
  model = card.id;
  $("model").textContent = document.title = model;
  plain = (await (await request("tokenizer_info")).json()).chat_template === null;
  showModelKind();
  showWelcome(card);
}

// Repeats `fetchModelInfo` until the model is loaded.
async function waitForModel() {
  if (plain !== null) return;
  try {
    await fetchModelInfo();
  } catch (error) {
    $("model").textContent = model ? `${model}: ${error.message}` : error.message;
    if (!error.message.includes("key")) setTimeout(waitForModel, RETRY_MS);
  }
}

function showModelKind() {
  document.body.classList.toggle("plain", plain);
  $("system-label").hidden = plain;
  $("ask").placeholder = plain ? "Text to continue" : "Message";
  $("ask").setAttribute("aria-label", plain ? "Text to continue" : "Your message");
  if (plain) $("hint").textContent = "This model has no chat template: it continues the text that you give.";
  render();
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new PageError("The connection ended before the answer did.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

function requestBody(exchange) {
  const system = $("system").value.trim(), stop = $("stops").value.split("\n").filter((text) => text);
  const body = { model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (plain) Object.assign(body, { prompt: exchange.ask + exchange.text, max_tokens: PLAIN_TOKENS });
  else {
    const answered = conversation.slice(0, conversation.indexOf(exchange)).filter((earlier) => earlier.text);
    body.messages = system ? [{ role: "system", content: system }] : [];
    for (const { ask, text } of answered) {
      body.messages.push({ role: "user", content: ask }, { role: "assistant", content: text });
    }
    body.messages.push({ role: "user", content: exchange.ask });
  }
  for (const [id, name] of Object.entries(NUMBERS)) if ($(id).value !== "") body[name] = Number($(id).value);
  if (stop.length) body.stop = stop.map((text) => text.replaceAll("\\n", "\n"));
  return JSON.stringify(body);
}


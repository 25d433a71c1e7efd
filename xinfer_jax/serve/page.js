const $ = (id) => document.getElementById(id);
const PLAIN_TOKENS = 128; // default max_tokens for a base model; the API's default is 16
const RETRY_MS = 2000; // while the model loads

// The exchanges: {ask, text, thoughts, figures, error}; thoughts is the reasoning, figures a line of statistics.
let conversation = [], running = null, model = "", plain = null, key = "", keyPrompt = null;
let follow = true, seenTop = 0;

// --- the state that the tab stores -------------------------------------------------------------------------

function save() {
  const settings = Object.fromEntries(["system", "temperature", "most"].map((name) => [name, $(name).value]));
  try {
    sessionStorage.setItem("xinfer_jax", JSON.stringify({ talk: conversation, settings, draft: $("ask").value }));
    $("note").textContent = "";
  } catch {
    $("note").textContent = "The browser cannot store this conversation: a reload will lose it.";
  }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("xinfer_jax")) ?? {};
    for (const [name, value] of Object.entries(kept.settings ?? {})) if ($(name)) $(name).value = value;
    $("ask").value = kept.draft ?? "";
    conversation = (kept.talk ?? []).filter((exchange) => typeof exchange.ask === "string");
  } catch {
    conversation = [];
  }
}

// --- one answer --------------------------------------------------------------------------------------------

async function answer(exchange) {
  const began = performance.now(), control = running = new AbortController();
  let first = 0, usage = null, reason = "";
  exchange.figures = exchange.error = "";
  follow = true;
  seenTop = 0;
  render();
  try {
    if (plain === null) await fetchModelInfo();
    const path = plain ? "v1/completions" : "v1/chat/completions";
    for await (const event of readEvents(await request(path, requestBody(exchange), control.signal))) {
      if (event.error) throw new PageError(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const text = plain ? choice.text : choice.delta.content, reasoning = choice.delta?.reasoning_content;
      if (reasoning) exchange.thoughts += reasoning;
      if (text) exchange.text += text;
      if (!first && (text || reasoning)) first = performance.now();
      scheduleRender();
    }
  } catch (error) {
    if (control.signal.aborted) reason = "stopped";
    else exchange.error = error instanceof PageError ? error.message : `The page failed: ${error.message}`;
  }
  exchange.figures = formatFigures(usage, reason, first && first - began, (performance.now() - first) / 1000);
  if (running === control) running = null;
  render();
  save();
}

function formatFigures(usage, reason, firstMs, seconds) {
  const parts = [];
  if (firstMs) parts.push(`first token ${Math.round(firstMs)} ms`);
  if (usage) {
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s`);
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    if (usage.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} cached`);
  }
  if (reason === "length") parts.push("reached the token limit");
  else if (reason && reason !== "stop") parts.push(reason);
  return parts.join(" · ");
}

// --- rendering ---------------------------------------------------------------------------------------------

function button(label, pressed, name = "") {
  const made = element("button", label);
  made.type = "button";
  made.className = name;
  made.addEventListener("click", () => pressed(made));
  return made;
}

function divElement(name) {
  const made = element("div");
  made.className = name;
  return made;
}

// The DOM nodes of an exchange, made once.
const views = new WeakMap();

function exchangeView(exchange) {
  if (views.has(exchange)) return views.get(exchange);
  const question = element("article", divElement("text")), reply = element("article");
  question.className = "user";
  question.dir = "auto";
  question.setAttribute("aria-label", "You");
  question.firstChild.textContent = exchange.ask;
  const view = { question, reply };
  for (const name of ["thoughts", "text", "error", "figures", "tools"]) reply.append(view[name] = divElement(name));
  reply.className = "assistant";
  reply.dir = "auto";
  reply.setAttribute("aria-label", "Answer");
  view.error.setAttribute("role", "alert");
  view.copy = button("Copy", (pressed) => copy(pressed, exchange.text));
  view.more = button("Continue", () => { if (!running) answer(exchange); }, "last");
  view.again = button("Regenerate", () => {
    if (running) return;
    exchange.text = exchange.thoughts = "";
    answer(exchange);
  }, "last");
  view.tools.append(view.copy, view.again, view.more);
  views.set(exchange, view);
  return view;
}

function showExchange(exchange, current) {
  const view = exchangeView(exchange);
  view.thoughts.textContent = exchange.thoughts;
  if (plain) view.text.textContent = exchange.text;
  else showMarkdown(view.text, exchange.text);
  if (view.error.textContent !== exchange.error) view.error.textContent = exchange.error;
  view.error.hidden = !exchange.error;
  view.figures.textContent = exchange.figures;
  view.reply.classList.toggle("waiting", current);
  view.reply.setAttribute("aria-busy", current);
  view.tools.hidden = current;
  view.copy.hidden = !exchange.text;
  view.more.hidden = !(plain && exchange.text);
  view.again.textContent = exchange.error ? "Try again" : "Regenerate";
}

function render() {
  const last = conversation.at(-1), shown = $("conversation").children;
  const wanted = conversation.map(exchangeView).flatMap((view) => [view.question, view.reply]);
  if (wanted.length !== shown.length || wanted.some((node, i) => node !== shown[i])) {
    $("conversation").replaceChildren(...wanted);
  }
  for (const exchange of conversation) showExchange(exchange, running !== null && exchange === last);
  const focused = document.activeElement;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  if (focused === $("stop") || focused === $("send")) (running ? $("stop") : $("ask")).focus();
  scrollToNewest();
}

let renderScheduled = false;

// Renders the newest answer 30 ms from now, however often it is called until then.
function scheduleRender() {
  if (renderScheduled) return;
  renderScheduled = true;
  setTimeout(() => {
    renderScheduled = false;
    if (running && conversation.length) showExchange(conversation.at(-1), true);
    scrollToNewest();
  }, 30);
}

// Follows the newest text until the user scrolls up, and again once the user scrolls to the end.
function updateFollow() {
  const { scrollHeight, scrollTop, clientHeight } = $("conversation");
  if (scrollHeight - scrollTop - clientHeight < 5) follow = true;
  else if (scrollTop < seenTop) follow = false;
  seenTop = scrollTop;
}

function scrollToNewest() {
  updateFollow();
  if (follow) $("conversation").scrollTop = $("conversation").scrollHeight;
  seenTop = $("conversation").scrollTop;
}

async function copy(pressed, text) {
  const label = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch { // the clipboard API needs https, except on this machine
    const area = element("textarea", text);
    area.className = "aside";
    document.body.append(area);
    area.select();
    pressed.textContent = document.execCommand("copy") ? "Copied" : "Copying is not allowed";
    area.remove();
    pressed.focus();
  }
  setTimeout(() => { pressed.textContent = label; }, 1500);
}

function fitInputHeight() {
  $("ask").style.height = "auto";
  $("ask").style.height = `${$("ask").scrollHeight + 2}px`;
}

// --- user actions ------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = $("ask").value, text = plain ? input : input.trim();
  if (!text.trim() || running) return;
  const exchange = { ask: text, text: "", thoughts: "", figures: "", error: "" };
  conversation.push(exchange);
  $("ask").value = "";
  fitInputHeight();
  answer(exchange);
  save();
});
$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
$("ask").addEventListener("input", fitInputHeight);
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("keys").open) running?.abort(); });
$("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  conversation = [];
  render();
  save();
  $("ask").focus();
});
$("conversation").addEventListener("click", (event) => {
  const pressed = event.target.closest(".copy-code");
  if (pressed) copy(pressed, pressed.closest(".code").querySelector("pre").textContent);
});
$("conversation").addEventListener("scroll", updateFollow);
$("keys-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("keys").close(key ? "use" : "");
});
$("keys-cancel").addEventListener("click", () => $("keys").close(""));
addEventListener("pagehide", save);
addEventListener("resize", scrollToNewest);

restore();
render();
fitInputHeight();
waitForModel();

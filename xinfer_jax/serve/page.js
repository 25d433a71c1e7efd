const $ = (id) => document.getElementById(id);
const PLAIN_TOKENS = 128; // of a continued text that names no limit: the API's own is 16
const RETRY_MS = 2000; // while the model is being loaded

// An exchange: {ask, text, thoughts, figures, error}.
let talk = [], running = null, model = "", plain = null, key = "", follow = true, seenTop = 0, asking = null;

// --- what the tab keeps -----------------------------------------------------------------------------------

function save() {
  const settings = Object.fromEntries(["system", "temperature", "most"].map((name) => [name, $(name).value]));
  try {
    sessionStorage.setItem("xinfer_jax", JSON.stringify({ talk, settings, draft: $("ask").value }));
    $("note").textContent = "";
  } catch {
    $("note").textContent = "The browser does not store this conversation: a reload will lose it.";
  }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("xinfer_jax")) ?? {};
    for (const [name, value] of Object.entries(kept.settings ?? {})) if ($(name)) $(name).value = value;
    $("ask").value = kept.draft ?? "";
    talk = (kept.talk ?? []).filter((exchange) => typeof exchange.ask === "string");
  } catch {
    talk = [];
  }
}

// --- one answer -------------------------------------------------------------------------------------------

async function answer(exchange) {
  const began = performance.now(), control = running = new AbortController();
  let first = 0, usage = null, reason = "";
  exchange.figures = exchange.error = "";
  follow = true;
  seenTop = 0;
  render();
  try {
    if (plain === null) await learn();
    const path = plain ? "v1/completions" : "v1/chat/completions";
    for await (const event of events(await call(path, bodyOf(exchange), control.signal))) {
      if (event.error) throw new Problem(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const piece = plain ? choice.text : choice.delta.content, thought = choice.delta?.reasoning_content;
      if (thought) exchange.thoughts += thought;
      if (piece) exchange.text += piece;
      if (!first && (piece || thought)) first = performance.now();
      soon();
    }
  } catch (error) {
    if (control.signal.aborted) reason = "stopped";
    else exchange.error = error instanceof Problem ? error.message : `The page failed: ${error.message}`;
  }
  exchange.figures = figures(usage, reason, first && first - began, (performance.now() - first) / 1000);
  if (running === control) running = null;
  render();
  save();
}

function figures(usage, reason, firstMs, seconds) {
  const parts = [];
  if (firstMs) parts.push(`first token ${Math.round(firstMs)} ms`);
  if (usage) {
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s`);
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    if (usage.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} cached`);
  }
  if (reason === "length") parts.push("ended at the limit of tokens");
  else if (reason && reason !== "stop") parts.push(reason);
  return parts.join(" · ");
}

// --- what is seen -----------------------------------------------------------------------------------------

function button(label, pressed, name = "") {
  const made = element("button", label);
  made.type = "button";
  made.className = name;
  made.addEventListener("click", () => pressed(made));
  return made;
}

function division(name) {
  const made = element("div");
  made.className = name;
  return made;
}

// The nodes of an exchange: made once, kept in `views`.
const views = new WeakMap();

function viewOf(exchange) {
  if (views.has(exchange)) return views.get(exchange);
  const question = element("article", division("text")), reply = element("article");
  question.className = "user";
  question.dir = "auto";
  question.setAttribute("aria-label", "You");
  question.firstChild.textContent = exchange.ask;
  const view = { question, reply };
  for (const name of ["thoughts", "text", "error", "figures", "tools"]) reply.append(view[name] = division(name));
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
  const view = viewOf(exchange);
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
  const last = talk.at(-1), wanted = talk.flatMap((exchange) => [viewOf(exchange).question, viewOf(exchange).reply]);
  if (wanted.length !== $("talk").children.length || wanted.some((node, i) => node !== $("talk").children[i])) {
    $("talk").replaceChildren(...wanted);
  }
  for (const exchange of talk) showExchange(exchange, running !== null && exchange === last);
  const focused = document.activeElement;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  if (focused === $("stop") || focused === $("send")) (running ? $("stop") : $("ask")).focus();
  toNewest();
}

let planned = false;

// Shows the newest answer with the next frame.
function soon() {
  if (planned) return;
  planned = true;
  setTimeout(() => {
    planned = false;
    if (running && talk.length) showExchange(talk.at(-1), true);
    toNewest();
  }, 30);
}

// Whether the newest is to be seen: until the person scrolls up, and again from the end on.
function lookWhere() {
  const { scrollHeight, scrollTop, clientHeight } = $("talk");
  if (scrollHeight - scrollTop - clientHeight < 5) follow = true;
  else if (scrollTop < seenTop) follow = false;
  seenTop = scrollTop;
}

function toNewest() {
  lookWhere();
  if (follow) $("talk").scrollTop = $("talk").scrollHeight;
  seenTop = $("talk").scrollTop;
}

async function copy(pressed, text) {
  const label = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch { // not over plain http from another machine
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

function fit() {
  $("ask").style.height = "auto";
  $("ask").style.height = `${$("ask").scrollHeight + 2}px`;
}

// --- what a person does -----------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("ask").value, text = plain ? given : given.trim();
  if (!text.trim() || running) return;
  const exchange = { ask: text, text: "", thoughts: "", figures: "", error: "" };
  talk.push(exchange);
  $("ask").value = "";
  fit();
  answer(exchange);
  save();
});
$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
$("ask").addEventListener("input", fit);
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("keys").open) running?.abort(); });
$("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  talk = [];
  render();
  save();
  $("ask").focus();
});
$("talk").addEventListener("click", (event) => {
  const pressed = event.target.closest(".copy-code");
  if (pressed) copy(pressed, pressed.closest(".code").querySelector("pre").textContent);
});
$("talk").addEventListener("scroll", lookWhere);
$("keys-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("keys").close(key ? "use" : "");
});
$("keys-cancel").addEventListener("click", () => $("keys").close(""));
addEventListener("pagehide", save);
addEventListener("resize", toNewest);

restore();
render();
fit();
meet();

const $ = (id) => document.getElementById(id);
const PLAIN_TOKENS = 128; // default max_tokens for a base model; the API's default is 16
const RETRY_MS = 2000; // while the model loads
const RATE_MS = 100; // an answer that comes within less time has no rate of its own
const EXAMPLES = {
  bundled: ["What is the capital of France?", "Tell me the capital city of Japan.", "Who are you?"],
  chat: ["How does a rainbow form? Answer in three sentences.", "Write a polite note that declines an invitation.",
    "Which is larger, 9.11 or 9.9, and why?"],
  plain: ["The capital of France is", "Once upon a time, "],
};

// The exchanges: {ask, text, thoughts, figures, error}; thoughts is the reasoning, figures a line of statistics.
let conversation = [], running = null, model = "", plain = null, key = "", keyPrompt = null;
let follow = true, seenTop = 0;

// --- one answer --------------------------------------------------------------------------------------------

async function answer(exchange) {
  const began = performance.now(), control = running = new AbortController();
  let first = 0, firstTokens = 1, latest = 0, usage = null, reason = "";
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
      if (text || reasoning) latest = performance.now();
      if (!first && latest) {
        first = latest;
        firstTokens = usage?.completion_tokens ?? 1;
      }
      scheduleRender();
    }
  } catch (error) {
    if (control.signal.aborted) reason = "stopped";
    else exchange.error = error instanceof PageError ? error.message : `The page failed: ${error.message}`;
  }
  const tokens = usage?.completion_tokens ?? 0, decoded = latest - first >= RATE_MS;
  const rate = decoded ? (tokens - firstTokens) / (latest - first) : tokens / (performance.now() - began);
  exchange.figures = formatFigures(usage, reason, first && first - began, 1000 * rate);
  if (running !== control) return; // another conversation is open
  running = null;
  render();
  saveConversation();
}

function formatFigures(usage, reason, firstMs, rate) {
  const parts = [];
  if (firstMs) parts.push(`first token ${Math.round(firstMs)} ms`);
  if (usage) {
    if (usage.completion_tokens > 1) parts.push(`${rate.toFixed(1)} tok/s`);
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
  const asked = divElement("text"), question = element("article", asked), reply = element("article");
  question.className = "user";
  question.dir = "auto";
  question.setAttribute("aria-label", "You");
  const view = { question, reply, asked };
  question.append(element("div", button("Edit", () => editQuestion(exchange, view))));
  question.lastChild.className = "tools";
  for (const name of ["thoughts", "text", "error", "figures", "tools"]) reply.append(view[name] = divElement(name));
  reply.className = "assistant";
  reply.dir = "auto";
  reply.setAttribute("aria-label", "Answer");
  view.error.setAttribute("role", "alert");
  view.copy = button("Copy", (pressed) => copy(pressed, exchange.text));
  view.more = button("Continue", () => { if (!running) answer(exchange); }, "last");
  view.again = button("Regenerate", () => answerAgain(exchange));
  view.tools.append(view.copy, view.again, view.more);
  views.set(exchange, view);
  return view;
}

function answerAgain(exchange, ask = exchange.ask) {
  if (running) return;
  branchAt(exchange);
  Object.assign(exchange, { ask, text: "", thoughts: "" });
  answer(exchange);
  saveConversation();
}

// Puts a field for another question in place of it; the answer is made anew.
function editQuestion(exchange, view) {
  if (running) return;
  const field = element("textarea", exchange.ask), form = element("form", field), tools = divElement("tools");
  const send = button("Send", () => form.requestSubmit(), "main");
  const close = () => { form.remove(); view.question.classList.remove("edited"); };
  tools.append(button("Cancel", close), send);
  form.append(tools);
  field.rows = Math.min(12, exchange.ask.split("\n").length + 1);
  field.setAttribute("aria-label", "Your message");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !field.value.trim()) return;
    close();
    answerAgain(exchange, field.value);
  });
  field.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); else sendOnEnter(event, form); });
  view.question.classList.add("edited");
  view.question.append(form);
  field.focus();
}

function showExchange(exchange, current) {
  const view = exchangeView(exchange);
  view.asked.textContent = exchange.ask;
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
  $("conversation").hidden = !last;
  $("welcome").hidden = Boolean(last);
  $("export-text").hidden = $("export-json").hidden = !last;
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

// The empty page: which model answers, what it is good for, and examples.
function showWelcome({ id, about = "", description = "" }) {
  $("welcome-name").textContent = id;
  $("welcome-about").textContent = about;
  $("welcome-use").textContent = description;
  const examples = plain ? EXAMPLES.plain : EXAMPLES[id] ?? EXAMPLES.chat;
  $("examples").replaceChildren(...examples.map((text) => button(text, () => {
    $("ask").value = text;
    $("form").requestSubmit();
  })));
}

function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
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
  saveConversation();
  saveDraft();
});
$("ask").addEventListener("keydown", (event) => sendOnEnter(event, $("form")));
$("ask").addEventListener("input", fitInputHeight);
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("keys").open) running?.abort(); });
$("clear").addEventListener("click", () => openConversation(newId()));
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
addEventListener("storage", showList);
$("menu").addEventListener("click", () => showMenu(!document.body.classList.contains("menu")));
$("export-text").addEventListener("click", exportText);
$("export-json").addEventListener("click", exportJSON);
addEventListener("pagehide", () => { if (running) saveConversation(); saveDraft(); });
addEventListener("resize", scrollToNewest);

restore();
render();
showList();
fitInputHeight();
waitForModel();

// The conversations that the browser stores, their list, and their export. page.js has the present one.

const PREFIX = "xinfer_jax.talk."; // of a conversation's name in localStorage; two tabs write different ones
const SETTINGS = ["system", "temperature", "top_p", "most", "seed", "stops"];
const CONFIRM_MS = 3000;

let current = newId(); // the present conversation

function newId() {
  return `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
}

function saveConversation() {
  if (!conversation.length) return;
  store(localStorage, PREFIX + current, { time: Date.now(), talk: conversation });
  showList();
}

// The settings are for all tabs; the draft and the present conversation are the tab's own.
function saveDraft() {
  store(localStorage, "xinfer_jax.settings", Object.fromEntries(SETTINGS.map((name) => [name, $(name).value])));
  store(sessionStorage, "xinfer_jax", { current, draft: $("ask").value });
}

function store(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    $("note").textContent = "";
  } catch {
    $("note").textContent = "The browser cannot store this: a reload will lose it. Delete old conversations.";
  }
}

function stored(storage, name) {
  try { return JSON.parse(storage.getItem(name)) ?? {}; } catch { return {}; }
}

function storedConversations() {
  const found = [];
  try {
    for (const name of Object.keys(localStorage)) {
      const { time, talk } = name.startsWith(PREFIX) ? stored(localStorage, name) : {};
      if (talk?.length) found.push({ id: name.slice(PREFIX.length), time, title: talk[0].ask.slice(0, 80) });
    }
  } catch { /* the browser stores nothing */ }
  return found.sort((one, other) => other.time - one.time);
}

function restore() {
  const kept = stored(sessionStorage, "xinfer_jax");
  for (const [name, value] of Object.entries(stored(localStorage, "xinfer_jax.settings"))) if ($(name)) $(name).value = value;
  $("ask").value = kept.draft ?? "";
  if (kept.current) readConversation(kept.current);
}

function readConversation(id) {
  current = id;
  const talk = stored(localStorage, PREFIX + id).talk ?? [];
  conversation = talk.filter((exchange) => typeof exchange.ask === "string");
}

function openConversation(id) {
  running?.abort();
  running = null;
  readConversation(id);
  saveDraft();
  showMenu(false);
  follow = true;
  render();
  showList();
  $("ask").focus();
}

function showList() {
  $("list").replaceChildren(...storedConversations().map(({ id, title }) => {
    const open = button(title, () => openConversation(id), "open");
    open.title = title;
    if (id === current) open.setAttribute("aria-current", "true");
    const remove = button("×", (pressed) => removeConversation(pressed, id), "remove");
    remove.setAttribute("aria-label", `Delete: ${title}`);
    return element("div", open, remove);
  }));
}

// Deletes at the second click.
function removeConversation(pressed, id) {
  if (pressed.textContent === "×") {
    pressed.textContent = "Delete?";
    setTimeout(() => { pressed.textContent = "×"; }, CONFIRM_MS);
    return;
  }
  localStorage.removeItem(PREFIX + id);
  if (id === current) openConversation(newId());
  else showList();
}

// What follows an exchange that changes stays in the earlier conversation; the changed one is a new one.
function branchAt(exchange) {
  const next = conversation.indexOf(exchange) + 1;
  if (next === conversation.length) return;
  saveConversation();
  current = newId();
  conversation = conversation.slice(0, next);
}

function showMenu(open) {
  document.body.classList.toggle("menu", open);
  $("menu").setAttribute("aria-expanded", open);
}

// --- export ------------------------------------------------------------------------------------------------

function exportText() {
  const parts = [`# ${model}`];
  for (const { ask, thoughts, text } of conversation) {
    parts.push("## Question", ask, "## Answer");
    if (thoughts) parts.push(thoughts.trim().replace(/^/gm, "> "));
    parts.push(text);
  }
  download("conversation.md", "text/markdown", `${parts.join("\n\n")}\n`);
}

function exportJSON() {
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, $(name).value]).filter(([, value]) => value));
  const messages = conversation.flatMap(({ ask, thoughts, text }) => [
    { role: "user", content: ask },
    { role: "assistant", content: text, ...(thoughts ? { reasoning: thoughts } : {}) },
  ]);
  download("conversation.json", "application/json", JSON.stringify({ model, settings, messages }, null, 2));
}

function download(name, type, text) {
  const made = element("a");
  made.href = URL.createObjectURL(new Blob([text], { type }));
  made.download = name;
  made.click();
  setTimeout(() => URL.revokeObjectURL(made.href), 60000);
}

"use strict";
// Markdown to DOM nodes: headings, lists, quotes, code, bold, italic and links. The model's text becomes text
// nodes only, never HTML. Links have http or https addresses only.

const MAX_DEPTH = 8; // of nested lists and quotes
// The last block of an answer is parsed every few milliseconds, so each expression must take linear time: no two
// adjacent repeats match the same characters, and the text between two marks of INLINE has a maximum length.
const FENCE = /^( *)(`{3,}(?!`)|~{3,}(?!~))(?=[^`]*$)\s*([\w+#.-]*)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(?=\S)|$)/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const INLINE = new RegExp([
  "(?<!(?<!\\\\)`)(?<ticks>`+)(?!`)(?<code>[^]{1,2000}?)(?<!`)\\k<ticks>(?!`)",
  "(?<mark>\\*\\*|__)(?=\\S)(?<strong>[^]{0,1000}?\\S)\\k<mark>",
  "\\*(?=[^\\s*])(?<star>[^*]{0,1000}?[^\\s*])\\*",
  "(?<!\\w)_(?=[^\\s_])(?<low>[^_]{0,1000}?[^\\s_])_(?!\\w)",
  "\\[(?<label>[^[\\]]{1,500})\\]\\((?<url>https?:\\/\\/[^\\s()<>]{1,2000})\\)",
  "\\\\(?<plain>[!-\\/:-@[-`{-~])",
].join("|"), "g");

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function link(label, url) {
  const made = element("a", ...inline(label));
  made.href = made.title = url;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, strong, star, low, label, url, plain } = match.groups, italic = star ?? low;
    nodes.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    if (code !== undefined) nodes.push(element("code", code));
    else if (strong !== undefined) nodes.push(element("strong", ...inline(strong)));
    else if (italic !== undefined) nodes.push(element("em", ...inline(italic)));
    else if (url !== undefined) nodes.push(link(label, url));
    else nodes.push(plain);
  }
  nodes.push(text.slice(at));
  return nodes.filter((node) => node !== "");
}

// The text of a heading's line, without # marks at its end.
function headingText(line) {
  const text = line.replace(HEADING, "").trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return text.slice(0, end).trimEnd();
}

// The index after the last line of the fenced code that begins at line `first`.
function fenceEnd(lines, first) {
  const mark = lines[first].match(FENCE)[2];
  for (let i = first + 1; i < lines.length; i++) {
    const line = lines[i].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) return i + 1;
  }
  return lines.length;
}

// The index after the last line of the list that begins at line `first`. A list has items, indented lines below
// them, and blank lines between these.
function listEnd(lines, first) {
  const edge = lines[first].match(ITEM)[1].length, ordered = /\d/.test(lines[first].match(ITEM)[2]);
  let end = first;
  for (let i = first; i < lines.length;) {
    const line = lines[i], item = line.match(ITEM), indent = line.search(/\S/);
    if (indent < 0) { i++; continue; }
    if (indent < edge + 2 && !(item && !RULE.test(line) && /\d/.test(item[2]) === ordered)) break;
    i = end = FENCE.test(line) ? fenceEnd(lines, i) : i + 1;
  }
  return Math.max(end, first + 1);
}

function paragraphEnd(lines, first) {
  let i = first + 1;
  while (i < lines.length && lines[i].trim() && !kindOf(lines[i])) i++;
  return i;
}

function kindOf(line) {
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return "";
}

// Splits a text into blocks: {kind, lines}.
function blocks(lines) {
  const found = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i++; continue; }
    const kind = kindOf(lines[i]);
    let end = i + 1;
    if (kind === "code") end = fenceEnd(lines, i);
    else if (kind === "list") end = listEnd(lines, i);
    else if (kind === "quote") while (end < lines.length && QUOTE.test(lines[end])) end++;
    else if (!kind) end = paragraphEnd(lines, i);
    found.push({ kind: kind || "paragraph", lines: lines.slice(i, end) });
    i = end;
  }
  return found;
}

function listNode(lines, depth) {
  const marker = lines[0].match(ITEM)[2], list = element(/\d/.test(marker) ? "ol" : "ul");
  if (/\d/.test(marker)) list.start = parseInt(marker, 10);
  const edge = lines[0].match(ITEM)[1].length, items = [];
  let indent = null; // a regular expression for the indentation of the lines below an item
  for (let i = 0; i < lines.length;) {
    const item = lines[i].match(ITEM);
    const end = FENCE.test(lines[i]) ? fenceEnd(lines, i) : i + 1;
    if (item && item[1].length < edge + 2) {
      items.push([lines[i].slice(item[0].length)]);
      indent = null;
    } else {
      if (lines[i].trim()) indent ??= RegExp(`^ {0,${lines[i].search(/\S/)}}`);
      items.at(-1).push(...lines.slice(i, end).map((line) => indent ? line.replace(indent, "") : line));
    }
    i = end;
  }
  for (const inside of items) {
    const parts = blocks(inside);
    const tight = parts.length && parts[0].kind === "paragraph" ? inline(parts.shift().lines.join("\n")) : [];
    list.append(element("li", ...tight, ...parts.map((part) => blockNode(part, depth + 1))));
  }
  return list;
}

function codeNode(lines) {
  const [, indent, , language] = lines[0].match(FENCE), closed = fenceEnd(lines, 0) === lines.length
    && lines.length > 1 && /^ *(`{3,}|~{3,}) *$/.test(lines.at(-1));
  const inside = lines.slice(1, closed ? -1 : undefined).map((line) => line.replace(RegExp(`^ {0,${indent.length}}`), ""));
  const pre = element("pre", element("code", inside.join("\n"))), copy = element("button", "Copy");
  pre.tabIndex = 0; // so that keys can scroll it
  copy.type = "button";
  copy.className = "copy-code";
  copy.setAttribute("aria-label", "Copy this code");
  const node = element("div", element("div", element("span", language || "code"), copy), pre);
  node.className = "code";
  return node;
}

function blockNode({ kind, lines }, depth = 0) {
  if (kind === "code") return codeNode(lines);
  if (kind === "rule") return element("hr");
  if (kind === "heading") {
    const level = Math.min(6, lines[0].match(HEADING)[1].length + 2); // below the page's own headings
    return element(`h${level}`, ...inline(headingText(lines[0])));
  }
  if (depth < MAX_DEPTH && kind === "list") return listNode(lines, depth);
  if (depth < MAX_DEPTH && kind === "quote") {
    const parts = blocks(lines.map((line) => line.replace(QUOTE, "")));
    return element("blockquote", ...parts.map((part) => blockNode(part, depth + 1)));
  }
  return element("p", ...inline(lines.join("\n")));
}

// Renders a text into an element. Blocks that have not changed since the last call keep their nodes.
function showMarkdown(target, text) {
  const known = target.blockSources ?? [];
  const wanted = blocks(text.replace(/\t/g, "    ").split("\n"));
  const sources = wanted.map((block) => `${block.kind}\n${block.lines.join("\n")}`);
  let same = 0;
  while (same < known.length && same < sources.length && known[same] === sources[same]) same++;
  while (target.childNodes.length > same) target.lastChild.remove();
  target.append(...wanted.slice(same).map((block) => blockNode(block)));
  target.blockSources = sources;
}

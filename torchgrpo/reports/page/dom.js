// Elements with their content. Text goes in as text alone: nothing of a run is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `options`: attributes by name; `class`, `text`, and `on` with listeners by event. */
function element(tag, options = {}, ...children) {
  return filled(document.createElement(tag), options, children);
}

/** The same of SVG. */
function drawn(tag, options = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), options, children);
}

function filled(node, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, heard] of Object.entries(value)) node.addEventListener(event, heard);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** A name that may be broken after each of its parts. */
function breakable(name) {
  return name.split(/(?<=[/_])/).flatMap((part, index) => (index ? [document.createElement("wbr"), part] : [part]));
}

/** A section of the page: a heading, one sentence on how to read it, its content. */
function section(id, title, how, ...content) {
  return element(
    "section", { id, "aria-labelledby": `${id}-title` },
    element("h2", { id: `${id}-title`, text: title }),
    how ? element("p", { class: "how", text: how }) : null,
    ...content,
  );
}

/** A choice among a few: [[value, label], ...]. `chosen` is called with the value. */
function choice(label, options, value, chosen) {
  const select = element("select", { "aria-label": label, on: { change: () => chosen(select.value) } },
    options.map(([key, text]) => element("option", { value: key, text, selected: key === value })));
  return element("label", { class: "field" }, element("span", { text: label }), select);
}

/** An input for text or a number, heard as it is typed. */
function entry(label, type, value, typed, more = {}) {
  const input = element("input", { type, value, "aria-label": label, on: { input: () => typed(input.value) }, ...more });
  return element("label", { class: "field" }, element("span", { text: label }), input);
}

/** Calls `draw` when the node comes near the screen, and again when its width changes or the theme does. */
function whenSeen(node, draw) {
  let seen = false;
  let width = 0;
  const redraw = () => { if (seen && node.clientWidth) draw(); };
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    seen = true;
    width = node.clientWidth;
    redraw();
  }, { rootMargin: "400px" }).observe(node);
  new ResizeObserver(() => {
    if (node.clientWidth === width) return;
    width = node.clientWidth;
    redraw();
  }).observe(node);
  return redraw;
}

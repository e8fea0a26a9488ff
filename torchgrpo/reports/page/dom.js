// Creates elements. Text of a run is set as text content and never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an HTML element. `options`: attributes by name; `class`, `text`, and `on` with listeners by event. */
function element(tag, options = {}, ...children) {
  return fillElement(document.createElement(tag), options, children);
}

/** Creates an SVG element; see `element`. */
function svgElement(tag, options = {}, ...children) {
  return fillElement(document.createElementNS(SVG, tag), options, children);
}

function fillElement(node, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Splits a name into nodes with a possible line break after each `/` and `_`. */
function breakable(name) {
  return name.split(/(?<=[/_])/).flatMap((part, index) => (index ? [document.createElement("wbr"), part] : [part]));
}

/** Creates a section of the page: heading, one sentence of explanation, content. */
function section(id, title, how, ...content) {
  return element(
    "section", { id, "aria-labelledby": `${id}-title` },
    element("h2", { id: `${id}-title`, text: title }),
    how ? element("p", { class: "how", text: how }) : null,
    ...content,
  );
}

/** Creates a select field for [[value, label], ...]. `onChange` is called with the value. */
function choice(label, options, value, onChange) {
  const select = element("select", { "aria-label": label, on: { change: () => onChange(select.value) } },
    options.map(([key, text]) => element("option", { value: key, text, selected: key === value })));
  return element("label", { class: "field" }, element("span", { text: label }), select);
}

/** Creates an input field for text or a number. `onInput` is called at each change. */
function entry(label, type, value, onInput, more = {}) {
  const input = element("input", { type, value, "aria-label": label, on: { input: () => onInput(input.value) }, ...more });
  return element("label", { class: "field" }, element("span", { text: label }), input);
}

/** Calls `draw` when the node approaches the screen and whenever its width changes. Returns a function that redraws. */
function drawWhenVisible(node, draw) {
  let isVisible = false;
  let width = 0;
  const redraw = () => { if (isVisible && node.clientWidth) draw(); };
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    isVisible = true;
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

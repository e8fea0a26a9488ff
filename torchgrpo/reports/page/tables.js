// Tables that sort by a click on a heading and scroll horizontally.

/**
 * Creates a table. columns: [{ title, value: row => sort key, show: row => text or node, numeric, mark: row => class }].
 * `onHover`, if given, is called with the row under the pointer, or null.
 */
function table(columns, rows, { caption, sortBy = null, descending = false, onHover = null } = {}) {
  const state = { column: sortBy, descending };
  const body = element("tbody");
  const headings = columns.map((column, index) => element(
    "th", { scope: "col", class: column.numeric ? "numeric" : null },
    element("button", { type: "button", class: "sort", text: column.title, on: { click: () => sort(index) } }),
  ));
  function sort(index) {
    state.descending = state.column === index ? !state.descending : Boolean(columns[index].numeric);
    state.column = index;
    fill();
  }
  function fill() {
    headings.forEach((heading, index) => {
      const isSorted = index === state.column;
      heading.setAttribute("aria-sort", isSorted ? (state.descending ? "descending" : "ascending") : "none");
    });
    body.replaceChildren(...sortRows(rows, columns[state.column], state.descending).map(tableRow));
  }
  function tableRow(row) {
    const cells = columns.map((column) => {
      const shown = column.show ? column.show(row) : setting(column.value(row));
      const kind = [column.numeric ? "numeric" : "", column.mark ? column.mark(row) : ""].join(" ").trim();
      return element("td", { class: kind || null }, shown);
    });
    const listeners = onHover ? { mouseenter: () => onHover(row), mouseleave: () => onHover(null) } : {};
    return element("tr", { on: listeners }, cells);
  }
  fill();
  return element(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", { text: caption }), element("thead", {}, element("tr", {}, headings)), body),
  );
}

/** Returns a copy of the rows sorted by a column; rows without a value come last. */
function sortRows(rows, column, descending) {
  if (!column) return rows;
  const missing = (value) => value === null || value === undefined || value === "";
  return [...rows].sort((left, right) => {
    const [a, b] = [column.value(left), column.value(right)];
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    const order = typeof a === "number" && typeof b === "number"
      ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return descending ? -order : order;
  });
}

// Elements from plain values: text always goes in as text, so nothing that a run is called can become markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const number = (value) => typeof value === "number" && Number.isFinite(value);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// The sample standard deviation, as `fedcover sweep` gives it.
function deviation(values) {
  const centre = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - centre) ** 2, 0) / (values.length - 1));
}

function compact(value) {
  if (!number(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e4)
    return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(size >= 100 ? 4 : 3));
}
const percent = (value) => (number(value) ? `${(100 * value).toFixed(1)} %` : "–");
const whole = (value) => (number(value) ? Math.round(value).toLocaleString("en") : "–");

function table(columns, rows, attributes) {
  // columns: [name, isNumber]; the first cell of a row names it
  const head = columns.map(([name, right]) => h("th", { scope: "col", class: right ? "num" : null }, name));
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      row.map((cell, place) =>
        place ? h("td", { class: columns[place][1] ? "num" : null }, cell) : h("th", { scope: "row" }, cell),
      ),
    ),
  );
  return h("table", attributes || {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

function scroller(attributes, ...children) {
  // a box that says so while something of it lies beyond its right edge
  const box = h("div", { ...attributes, class: ["scroll", attributes.class].filter(Boolean).join(" ") }, ...children);
  const look = () => box.toggleAttribute("data-more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  const soon = () => requestAnimationFrame(look); // the hint changes the height that is being watched
  new ResizeObserver(soon).observe(box);
  new MutationObserver(soon).observe(box, { childList: true });
  box.addEventListener("scroll", soon);
  return box;
}

function lazyTable(name, make) {
  // the numbers behind a plot: made when somebody wants them
  const box = scroller({});
  const details = h("details", {}, h("summary", {}, name), box);
  details.addEventListener("toggle", () => details.open && box.replaceChildren(make()));
  details.refresh = () => details.open && box.replaceChildren(make());
  return details;
}

function copyButton(name, text) {
  const button = h("button", { type: "button" }, name);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy the text";
    }
    setTimeout(() => {
      button.textContent = name;
    }, 2000);
  });
  return button;
}

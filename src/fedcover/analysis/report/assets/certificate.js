// The certificate of a run, whatever is in it: terms, constants and conditions as tables.
function certificateCard(run) {
  if (!run.certificate) return null;
  const kind = String(run.certificate.kind ?? "certificate");
  const rest = Object.fromEntries(Object.entries(run.certificate).filter(([name]) => name !== "kind"));
  return h(
    "section",
    { class: "card", id: "certificate" },
    h("h3", {}, "The certificate ", h("span", { class: "badge" }, kind)),
    h(
      "p",
      { class: "small soft" },
      kind === "estimate" ? "Some of its constants were estimated: an indication, no proof. " : "",
      "Lists of more than 50 entries are shortened here; certificate.json has all of them.",
    ),
    told(rest),
  );
}

// any JSON value: an object's plain entries as one table, everything larger under its own name
const simple = (value) => value === null || typeof value !== "object";
const rowsOf = (value) => {
  const entries = Array.isArray(value) ? value.map((row) => [null, row]) : Object.entries(value);
  return entries.length && entries.every(([, row]) => !simple(row) && !Array.isArray(row)) ? entries : null;
};
const spoken = (name) => name.replaceAll("_", " ");

function told(value) {
  const entries = Object.entries(value);
  const plain = entries.filter(([, inner]) => simple(inner) || (Array.isArray(inner) && inner.every(simple)));
  const larger = entries.filter((entry) => !plain.includes(entry));
  return [
    plain.length
      ? h(
          "table",
          {},
          h(
            "tbody",
            {},
            plain.map(([name, inner]) =>
              h("tr", {}, h("th", { scope: "row" }, spoken(name)), h("td", {}, cell(inner))),
            ),
          ),
        )
      : null,
    larger.map(([name, inner]) => {
      const rows = rowsOf(inner);
      return h(
        "details",
        { open: !rows || rows.length <= 16 },
        h("summary", {}, spoken(name)),
        rows ? scroller({}, rowTable(rows)) : h("div", { class: "inner" }, told(inner)),
      );
    }),
  ];
}

function rowTable(rows) {
  const named = rows[0][0] !== null && !rows.every(([, row]) => simple(row.name) && row.name);
  const columns = [...new Set(rows.flatMap(([, row]) => Object.keys(row)))];
  const heads = columns.map((name) => [
    spoken(name),
    rows.every(([, row]) => row[name] === undefined || typeof row[name] === "number"),
  ]);
  const cells = ([name, row]) => [
    ...(named ? [spoken(name)] : []),
    ...columns.map((column) => cell(row[column] ?? null)),
  ];
  return table([...(named ? [["", false]] : []), ...heads], rows.map(cells));
}

function cell(value) {
  if (value === null) return "–";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(+value.toPrecision(4));
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (Array.isArray(value)) {
    if (value.every((inner) => typeof inner === "number") && value.length > 12) return `${value[0]} … ${value.at(-1)}`;
    return value.length ? value.map((inner) => h("div", {}, simple(inner) ? cell(inner) : inline(inner))) : "–";
  }
  return Object.entries(value).map(([name, inner]) =>
    h("div", {}, `${spoken(name)} `, h("b", {}, simple(inner) ? cell(inner) : inline(inner))),
  );
}

function inline(value) {
  const { name, holds, ...rest } = value;
  const words = Object.entries(rest).map(
    ([key, inner]) => `${spoken(key)} ${simple(inner) ? cell(inner) : JSON.stringify(inner)}`,
  );
  const mark = typeof holds === "boolean" ? (holds ? "✓ holds: " : "✗ does not hold: ") : "";
  return `${mark}${name ?? ""}${words.length ? ` (${words.join(", ")})` : ""}`;
}

// Pictures as they are written in run folders (see pictures.py): unpacked, read and painted.
const SIDE = 12;

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const digits = (text) =>
  [...text.replace(/(\d)([a-z])/g, (_, digit, letter) => digit.repeat(letter.charCodeAt(0) - 95))].map(Number);
const shareOf = (digit) => (digit === 0 ? 0 : digit === 9 ? 1 : (digit - 0.5) / 8);

function pixels(text, shape) {
  // a picture as rows of shares; see pictures.py for how it is written
  const [rows, columns] = [Math.min(SIDE, shape[0]), Math.min(SIDE, shape[1] ?? 1)];
  const strip = (part, length) => (part.length === 1 ? Array(length).fill(shareOf(+part)) : digits(part).map(shareOf));
  if (text.includes("/")) {
    const [down, across] = text.split("/");
    return strip(down, rows).map((a) => strip(across, columns).map((b) => a * b));
  }
  const flat = strip(text, rows * columns);
  return Array.from({ length: rows }, (_, row) => flat.slice(row * columns, (row + 1) * columns));
}
const average = (picture) => mean(picture.flat());

function paint(canvas, picture, colour, hatched) {
  const size = 60;
  canvas.width = canvas.height = size;
  const pen = canvas.getContext("2d");
  const [base, full] = [resolvedColours.card, resolvedColours[colour]];
  pen.fillStyle = mixed(base, full, 0);
  pen.fillRect(0, 0, size, size);
  const [high, wide] = [size / picture.length, size / picture[0].length];
  picture.forEach((row, i) =>
    row.forEach((share, j) => {
      if (!share) return;
      const box = [
        Math.floor(j * wide),
        Math.floor(i * high),
        Math.ceil((j + 1) * wide) - Math.floor(j * wide),
        Math.ceil((i + 1) * high) - Math.floor(i * high),
      ];
      pen.fillStyle = mixed(base, full, hatched ? 0.25 + 0.6 * share : 0.12 + 0.88 * share);
      pen.fillRect(...box);
      if (hatched) {
        pen.strokeStyle = mixed(base, full, 0);
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(box[0], box[1] + box[3]);
        pen.lineTo(box[0] + box[2], box[1]);
        pen.stroke();
      }
    }),
  );
}
let resolvedColours = {};
const readColours = () => {
  resolvedColours = { card: resolved("card"), held: resolved("held"), warn: resolved("warn") };
};

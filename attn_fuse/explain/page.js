// Names the cell of a picture under the pointer, and opens the card that a link leads to.
for (const figure of document.querySelectorAll("figure[data-picture]")) {
  const { lengths, rows } = JSON.parse(figure.dataset.picture);
  const svg = figure.querySelector("svg"), told = figure.querySelector("output"), cursor = svg.querySelector(".cursor");
  const words = { "#": "seen", "+": "seen in part", ".": "hidden" };
  const at = (share, cells) => Math.max(0, Math.min(cells - 1, Math.floor(share * cells)));
  // Cells as torch.tensor_split makes them: the first ones are longer by one.
  const start = (length, cells, cell) => cell * Math.floor(length / cells) + Math.min(cell, length % cells);
  const positions = (one, many, first, last) => (first === last ? `${one} ${first}` : `${many} ${first} to ${last}`);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const y = at((event.clientY - box.top) / box.height, rows.length);
    const x = at((event.clientX - box.left) / box.width, rows[0].length);
    const i = start(lengths[0], rows.length, y), j = start(lengths[1], rows[0].length, x);
    const cell = rows[y][x], isMask = typeof rows[0] === "string";
    const lastI = isMask ? start(lengths[0], rows.length, y + 1) - 1 : i;
    const lastJ = isMask ? start(lengths[1], rows[0].length, x + 1) - 1 : j;
    const said = isMask ? words[cell] : cell === null ? "hidden" : cell;
    told.textContent = `${positions("query", "queries", i, lastI)}, ${positions("key", "keys", j, lastJ)}: ${said}`;
    cursor.setAttribute("x", x);
    cursor.setAttribute("y", y);
    cursor.setAttribute("visibility", "visible");
  });
}
const open = () => {
  for (let e = document.getElementById(location.hash.slice(1)); e; e = e.parentElement) if ("open" in e) e.open = true;
};
addEventListener("hashchange", open);
open();

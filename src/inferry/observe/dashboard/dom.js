// Elements. Text from the gateway only ever becomes text nodes and attribute values, never markup.

const SVG = "http://www.w3.org/2000/svg";

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};

export const h = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
export const byId = (id) => document.getElementById(id);

// Writes only what has changed: an unchanged node keeps its selection and costs no layout.
export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};
export const setAttribute = (node, name, value) => {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
};
export const setShare = (node, property, share) => {
  const value = `${(100 * Math.max(0, Math.min(1, share))).toFixed(2)}%`;
  if (node.style[property] !== value) node.style[property] = value;
};

// Keeps one child per item, in the items' order, by key. `make` returns a row {node, update}.
export class KeyedList {
  constructor(parent, make, empty = null) {
    this.parent = parent;
    this.make = make;
    this.empty = empty;
    this.rows = new Map();
    this.shown = null;
  }

  update(items, keyOf) {
    const wanted = new Map(items.map((item) => [keyOf(item), item]));
    for (const [key, row] of this.rows) {
      if (!wanted.has(key)) {
        row.node.remove();
        this.rows.delete(key);
      }
    }
    let before = null;
    for (const [key, item] of [...wanted].reverse()) {
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.make(item)));
      row.update(item);
      if (row.node.parentNode !== this.parent || row.node.nextSibling !== before) this.parent.insertBefore(row.node, before);
      before = row.node;
    }
    if (!this.empty) return;
    if (items.length === 0 && !this.shown) this.parent.append((this.shown = this.empty()));
    else if (items.length > 0 && this.shown) {
      this.shown.remove();
      this.shown = null;
    }
  }
}

() => {
  // Pieces of text that cover each other, and those that leave the window.
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest(".toast, .bar, noscript, script, thead, .skip, dialog:not([open])")) continue;
    if (!parent.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      let [left, right] = [box.left, box.right];
      for (let up = parent; up; up = up.parentElement) {
        if (getComputedStyle(up).overflowX !== "visible") {
          const clip = up.getBoundingClientRect();
          [left, right] = [Math.max(left, clip.left), Math.min(right, clip.right)];
        }
      }
      if (right > left) found.push({ node, text: node.textContent.trim(), left, right, top: box.top + 2, bottom: box.bottom - 2 });
    }
  }
  const clashes = found.filter((one) => one.right > innerWidth + 0.5 || one.left < -0.5).map((one) => one.text);
  found.forEach((one, at) => {
    for (const other of found.slice(at + 1)) {
      const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      if (wide > 1 && high > 1 && one.node !== other.node) clashes.push(`${one.text} / ${other.text}`);
    }
  });
  return clashes;
}

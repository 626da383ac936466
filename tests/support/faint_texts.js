() => {
  // Texts with less contrast than WCAG AA asks for: 4.5, or 3 for large text.
  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
    }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("noscript, script, .toast, .skip, dialog:not([open])")) continue;
    if (!parent.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const grounds = [];
    for (let up = parent; up; up = up.parentElement) grounds.unshift(getComputedStyle(up).backgroundColor);
    const style = getComputedStyle(parent);
    const [ground, text] = [light(paint(grounds)), light(paint([...grounds, style.color]))];
    const contrast = (Math.max(ground, text) + 0.05) / (Math.min(ground, text) + 0.05);
    const isLarge = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (contrast < (isLarge ? 3 : 4.5)) found.push(`${node.textContent.trim()}: ${contrast.toFixed(2)}`);
  }
  return found;
}

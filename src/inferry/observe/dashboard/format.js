// Numbers as text. A dash stands for what is not known.

export const DASH = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const count = (value) => {
  if (!known(value)) return DASH;
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)}B`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k`;
  return Math.round(value).toLocaleString("en-US");
};

export const rate = (value) => {
  if (!known(value)) return DASH;
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
};

export const percent = (share, digits = 1) => {
  if (!known(share)) return DASH;
  if (share >= 0.99995) return "100%";
  // Never 100 % where something was missed.
  const value = Math.min(100 * share, 100 - 10 ** -digits);
  return `${value.toFixed(value < 10 ? Math.min(1, digits) : digits)}%`;
};

export const milliseconds = (value) => {
  if (!known(value)) return DASH;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return seconds(value / 1000);
};

export const seconds = (value) => {
  if (!known(value)) return DASH;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
};

export const ago = (then, now) => {
  const passed = now - then;
  return passed < 2 ? "now" : `${seconds(Math.round(passed))} ago`;
};

export const money = (value) => {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  if (value < 0.01) return value.toPrecision(2);
  return value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 });
};

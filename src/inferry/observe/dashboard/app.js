// Puts the page together: one stream of snapshots in, panels out, and the few actions.

import { setSpan } from "./charts.js";
import { byId, setAttribute, setText } from "./dom.js";
import { count, seconds } from "./format.js";
import { LanesPanel } from "./lanes.js";
import { RunsPanel } from "./runs.js";
import { act, Refused, signIn, signOut } from "./session.js";
import { AlertsPanel, CostsPanel } from "./side.js";
import { Stream } from "./stream.js";
import { cancelPath, confirmDialog, RunDialog } from "./timeline.js";
import { TotalsPanel } from "./totals.js";
import { WorkersPanel } from "./workers.js";

const STATUS = { ready: ["Ready", "good"], starting: ["Starting", "wait"], draining: ["Draining", "bad"] };

let toastTimer = null;
const toast = (text, isBad = false) => {
  const node = byId("toast");
  setText(node, text);
  setAttribute(node, "data-bad", isBad ? "true" : null);
  node.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => node.classList.remove("shown"), 6000);
};

const report = (error) => {
  if (error instanceof Refused && error.status === 403) stream.connect();
  toast(error instanceof Refused ? error.message : "The gateway does not respond.", true);
};

const cancelRun = async (run) => {
  const calls = run.tree_in_flight ? `${count(run.tree_in_flight)} calls in flight end now. ` : "";
  if (!(await confirmDialog(`Cancel run ${run.id}?`, `${calls}Later calls of the run are refused.`, "Cancel run"))) return;
  try {
    const done = await act("DELETE", cancelPath(run));
    const waiting = done.unconfirmed ? `, ${count(done.unconfirmed)} not confirmed yet` : "";
    toast(`Run cancelled: ${count(done.queued)} queued calls removed, ${count(done.freed)} running calls freed${waiting}.`);
    runDialog.refresh();
  } catch (error) {
    report(error);
  }
};

const changeWorker = async (worker) => {
  const verb = worker.drained ? "readmit" : "drain";
  const text = worker.drained ? "It takes calls again." : "It takes no new calls. Running calls finish.";
  const title = `${worker.drained ? "Readmit" : "Drain"} worker ${worker.name}?`;
  if (!(await confirmDialog(title, text, worker.drained ? "Readmit" : "Drain"))) return;
  try {
    await act("POST", `/admin/workers/${encodeURIComponent(worker.name)}/${verb}`);
    toast(`Worker ${worker.name}: ${worker.drained ? "readmitted" : "draining"}.`);
  } catch (error) {
    report(error);
  }
};

const copy = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser did not allow copying; select the text instead.", true);
  }
};

const runDialog = new RunDialog(byId("run-dialog"), { cancel: cancelRun });
const panels = [
  new TotalsPanel(byId("totals")),
  new LanesPanel(byId("lane-rows")),
  new AlertsPanel(byId("alert-rows")),
  new CostsPanel(byId("cost-rows")),
  new WorkersPanel(byId("worker-cards"), changeWorker),
  new RunsPanel(byId("run-rows"), { open: (run) => runDialog.open(run), cancel: cancelRun, copy }),
];

let times = [];
const showSeries = (series) => {
  times = series.at;
  for (const panel of panels) panel.series?.(series);
};

const showLive = (state) => {
  setText(byId("span"), `last ${Math.round(setSpan(times, state.at) / 60)} minutes`);
  const [text, level] = STATUS[state.status];
  setText(byId("status"), text);
  setAttribute(byId("status"), "data-state", level);
  setText(byId("uptime"), `up ${seconds(Math.max(1, state.at - state.started_at))}`);
  setText(byId("version"), `Inferry ${state.version}`);
  byId("main").hidden = false;
  for (const panel of panels) panel.live(state);
};

const showSession = (session) => {
  byId("gate").hidden = session.signed_in;
  byId("sign-out").hidden = !(session.signed_in && session.needs_key);
  if (session.signed_in) return;
  byId("main").hidden = true;
  setText(byId("status"), "Signed out");
  showConnection("out", null);
  byId("gate-form").hidden = !session.needs_key;
  setText(byId("gate-title"), session.needs_key ? "Sign in" : "This page is not available here");
  const local = `http://127.0.0.1:${location.port || 80}/`;
  setText(
    byId("gate-text"),
    session.needs_key
      ? "The dashboard shows the work of all tenants. Sign in with the gateway's admin key."
      : `The gateway has no admin key, so it shows this page only to a browser on its own machine: open ${local} there, or forward the port. To use it from elsewhere, set server.admin_key.`,
  );
  if (session.needs_key) byId("key").focus();
};

let lostSince = null;
const showConnection = (state, lastAt) => {
  if (state === "live") lostSince = null;
  else if (state === "lost") lostSince ??= lastAt ?? Date.now();
  const node = byId("connection");
  setAttribute(node, "data-state", state);
  setAttribute(document.documentElement, "data-connection", state);
  const passed = lostSince === null ? 0 : Math.round((Date.now() - lostSince) / 1000);
  const text = { live: "Live", out: "", lost: passed > 4 ? `Reconnecting · ${seconds(passed)} old` : "Reconnecting" }[state];
  setText(node.lastElementChild, text);
};

const stream = new Stream({
  live: showLive,
  session: showSession,
  connection: showConnection,
  series: showSeries,
});

byId("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = byId("key");
  setText(byId("gate-error"), "");
  try {
    await signIn(field.value);
    field.value = "";
    stream.connect();
  } catch (error) {
    setText(byId("gate-error"), error instanceof Refused ? `${error.message}.` : "The gateway does not respond.");
    field.select();
  }
});

byId("sign-out").addEventListener("click", async () => {
  stream.close();
  await signOut().catch(() => null);
  stream.connect();
});

const THEMES = ["system", "light", "dark"];
const showTheme = () => byId("theme").setAttribute("aria-label", `Colour theme: ${document.documentElement.dataset.theme ?? "system"}`);
byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (next === "system") localStorage.removeItem("inferry-theme");
    else localStorage.setItem("inferry-theme", next);
  } catch {
    // Storage may be disabled: the choice lasts as long as the page.
  }
  showTheme();
  toast(`Colour theme: ${next}`);
});

showTheme();
stream.connect();

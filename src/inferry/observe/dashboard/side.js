// Alerts, and cost by tenant.

import { byId, h, KeyedList, setAttribute, setShare, setText } from "./dom.js";
import { ago, count, money, seconds } from "./format.js";

const SHOWN = 5;

class AlertRow {
  constructor() {
    this.name = h("strong");
    this.summary = h("p");
    this.labels = h("p", { class: "note" });
    this.since = h("span", { class: "note" });
    this.node = h("div", { class: "alert" }, h("i", { "aria-hidden": "true" }), h("div", {}, h("div", { class: "row" }, this.name, this.since), this.summary, this.labels));
  }

  update(alert) {
    setText(this.name, alert.name);
    setText(this.summary, alert.summary);
    const unnamed = Object.entries(alert.labels).filter(([, value]) => !alert.summary.includes(value));
    setText(this.labels, unnamed.map(([name, value]) => `${name} ${value}`).join(" · "));
    setAttribute(this.node, "data-severity", alert.severity);
    setAttribute(this.node, "data-state", alert.state);
  }
}

export class AlertsPanel {
  constructor(parent) {
    this.note = h("p", { class: "empty" });
    this.list = new KeyedList(parent, () => new AlertRow(), () => this.note);
  }

  live(state) {
    const alerts = state.alerts ?? [];
    setText(this.note, state.alerts === null ? "No alert rules are loaded." : "All quiet: no alert is pending or firing.");
    this.list.update(alerts, (alert) => `${alert.name} ${JSON.stringify(alert.labels)}`);
    for (const alert of alerts) {
      const row = this.list.rows.get(`${alert.name} ${JSON.stringify(alert.labels)}`);
      setText(row.since, `${alert.state} · ${ago(alert.since, state.at)}`);
    }
    const firing = alerts.filter((alert) => alert.state === "firing").length;
    setText(byId("alert-count"), firing ? `${firing} firing` : "");
    setAttribute(byId("alerts"), "data-firing", firing ? "true" : null);
  }
}

class CostRow {
  constructor() {
    this.name = h("span", { class: "tenant" });
    this.value = h("strong");
    this.bar = h("i");
    this.note = h("span", { class: "note" });
    this.node = h("div", { class: "cost" }, h("div", { class: "row" }, this.name, this.value), h("div", { class: "meter" }, this.bar), this.note);
  }

  update({ tenant, unit, most }) {
    const value = unit === "cost" ? tenant.cost ?? 0 : tenant.prompt_tokens + tenant.output_tokens;
    setText(this.name, tenant.tenant);
    setAttribute(this.name, "title", tenant.tenant);
    setText(this.value, unit === "cost" ? money(tenant.cost) : `${count(value)} tokens`);
    setShare(this.bar, "width", most > 0 ? value / most : 0);
    const gpu = tenant.gpu_seconds === null ? "" : ` · ${seconds(tenant.gpu_seconds)} engine time`;
    const failed = tenant.failed ? ` · ${count(tenant.failed)} failed` : "";
    setText(this.note, `${count(tenant.calls)} calls · ${count(tenant.output_tokens)} tokens out${gpu}${failed}`);
  }
}

export class CostsPanel {
  constructor(parent) {
    this.empty = h("p", { class: "empty" });
    this.rows = h("div", { class: "cost-list" });
    this.more = h("p", { class: "note" });
    parent.append(this.rows, this.more);
    this.list = new KeyedList(this.rows, () => new CostRow(), () => this.empty);
  }

  live(state) {
    const tenants = state.costs?.tenants ?? [];
    const unit = tenants.some((tenant) => tenant.cost) ? "cost" : "tokens";
    const worth = (tenant) => (unit === "cost" ? tenant.cost ?? 0 : tenant.prompt_tokens + tenant.output_tokens);
    const most = Math.max(0, ...tenants.map(worth));
    setText(this.empty, state.costs === null ? "The ledger has not been read yet." : "No call has ended in the last 24 hours.");
    this.list.update(tenants.slice(0, SHOWN).map((tenant) => ({ tenant, unit, most })), (item) => item.tenant.tenant);
    const total = tenants.reduce((sum, tenant) => sum + (tenant.cost ?? 0), 0);
    setText(byId("cost-note"), unit === "cost" && !state.costs.others ? `${money(total)} in the last 24 hours` : "last 24 hours");
    const others = tenants.slice(SHOWN).length + (state.costs?.others ?? 0);
    const hint = unit === "tokens" && tenants.length ? "No model has a price: set prices in the configuration to see money." : "";
    setText(this.more, others ? `and ${count(others)} more tenants. ${hint}` : hint);
  }
}

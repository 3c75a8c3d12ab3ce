//! Measures experiments: every point in rounds of a plain and a preloaded run, in turn.

use crate::pairs::{Lab, Sample};
use crate::plan::{Experiment, Limit, Metric, Point};
use crate::raw;
use crate::stats::{Runs, Verdict};
use serde_json::{json, Value};
use std::time::Duration;

/// One metric of a point, in both variants.
pub struct Cell {
    /// What it is.
    pub metric: Metric,
    /// Without the library.
    pub plain: Runs,
    /// With it.
    pub ring: Runs,
}

impl Cell {
    /// How they compare.
    pub fn verdict(&self) -> Verdict {
        Verdict::of(&self.plain, &self.ring, self.metric.more)
    }
}

/// One point, measured.
pub struct Row {
    /// Its label.
    pub x: String,
    /// Metrics, in the experiment's order, then processor time.
    pub cells: Vec<Cell>,
    /// Share of the bytes of preloaded processes that went over rings, the median of all rounds.
    pub share: Option<f64>,
    /// The limit of shared memory for the first metric.
    pub limit: Option<f64>,
    /// What went wrong, if it did.
    pub failed: Option<String>,
}

/// One experiment, measured.
pub struct Outcome {
    /// Its name.
    pub name: &'static str,
    /// Its heading.
    pub title: String,
    /// What was done.
    pub what: &'static str,
    /// The axis.
    pub axis: &'static str,
    /// What the charts show: the experiment's metrics and processor time.
    pub metrics: Vec<Metric>,
    /// The points.
    pub rows: Vec<Row>,
}

/// Processor time of a message (or request, or connection).
pub const CPU_MSG: Metric = Metric { key: "cpu_msg", label: "CPU seconds per million messages", more: false };
/// Processor time by bytes.
pub const CPU_GB: Metric = Metric { key: "cpu_gb", label: "CPU seconds per GB", more: false };
/// The server's part.
pub const CPU_SERVER: Metric =
    Metric { key: "cpu_server", label: "of it the server's, per million messages", more: false };

fn number(s: &Sample, key: &str) -> Option<f64> {
    let by = |cpu: f64, n: &str, unit: f64| s.values.get(n).filter(|n| **n > 0.0).map(|n| cpu / n * unit);
    match key {
        "cpu_msg" => by(s.cpu, "messages", 1e6),
        "cpu_server" => by(s.cpu_server, "messages", 1e6),
        "cpu_gb" => by(s.cpu, "bytes", 1e9),
        _ => s.values.get(key).copied(),
    }
}

fn limit(e: &Experiment, p: &Point) -> Option<f64> {
    let time = Duration::from_millis(100);
    match e.limit {
        Limit::No => None,
        Limit::Trip => Some(raw::trip(p.size, time)),
        Limit::Flow => Some(raw::flow(p.size, time)),
    }
}

fn point(e: &Experiment, p: &Point, lab: &Lab, rounds: usize, tick: &mut dyn FnMut(&str)) -> Row {
    let mut runs: [Vec<Sample>; 2] = [Vec::new(), Vec::new()];
    let mut row = Row { x: p.x.clone(), cells: vec![], share: None, limit: limit(e, p), failed: None };
    for _ in 0..rounds {
        for (i, r) in runs.iter_mut().enumerate() {
            let variant = ["plain", "preloaded"][i];
            tick(&format!("{} {} {variant}", e.name, p.x));
            if row.failed.is_some() {
                continue;
            }
            match lab.run(p.pair.as_ref(), i == 1) {
                Ok(s) => r.push(s),
                Err(why) => row.failed = Some(format!("{variant}: {why}")),
            }
        }
    }
    if row.failed.is_some() {
        return row;
    }
    for m in e.metrics.iter().chain(&[CPU_MSG, CPU_SERVER, CPU_GB]) {
        let of = |i: usize| Runs::new(runs[i].iter().filter_map(|s| number(s, m.key)).collect());
        if let (Some(plain), Some(ring)) = (of(0), of(1)) {
            row.cells.push(Cell { metric: *m, plain, ring });
        }
    }
    let shares: Vec<f64> = runs[1].iter().map(|s| s.ring as f64 / (s.ring + s.tcp).max(1) as f64).collect();
    row.share = Runs::new(shares).map(|r| r.median);
    row
}

/// Measures an experiment; `tick` is called before each run with what is about to be run.
pub fn experiment(e: &Experiment, lab: &Lab, rounds: usize, tick: &mut dyn FnMut(&str)) -> Outcome {
    let rows = e.points.iter().map(|p| point(e, p, lab, rounds, tick)).collect();
    let metrics = e.metrics.iter().chain(&[CPU_MSG]).copied().collect();
    Outcome { name: e.name, title: e.title.clone(), what: e.what, axis: e.axis, metrics, rows }
}

impl Outcome {
    /// For the report's data.
    pub fn json(&self) -> Value {
        let cell = |c: &Cell| {
            json!({
                "metric": c.metric.key, "label": c.metric.label, "more_is_better": c.metric.more,
                "plain": c.plain.json(), "preloaded": c.ring.json(), "verdict": c.verdict().text(),
            })
        };
        let row = |r: &Row| {
            json!({
                "x": r.x, "results": r.cells.iter().map(cell).collect::<Vec<_>>(),
                "share_on_rings": r.share, "shared_memory_limit": r.limit, "failed": r.failed,
            })
        };
        json!({
            "name": self.name, "title": self.title, "what": self.what, "axis": self.axis,
            "points": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

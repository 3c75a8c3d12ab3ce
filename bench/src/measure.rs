//! Measures experiments: every point in rounds of a run of each variant, in turn.

use crate::link::Link;
use crate::pairs::{Lab, Sample};
use crate::plan::{Experiment, Metric};
use crate::stats::{Runs, Verdict};
use crate::variant::Variant;
use serde_json::{json, Value};

/// One metric of a point, in all variants.
pub struct Cell {
    /// What it is.
    pub metric: Metric,
    /// Without the library.
    pub plain: Runs,
    /// With it.
    pub ring: Runs,
    /// With other accelerators; `None` where one failed.
    pub others: Vec<Option<Runs>>,
}

impl Cell {
    /// How ringsock compares with plain.
    pub fn verdict(&self) -> Verdict {
        self.versus(&self.ring)
    }

    /// How a variant compares with plain.
    pub fn versus(&self, other: &Runs) -> Verdict {
        Verdict::of(&self.plain, other, self.metric.more)
    }

    /// Every variant's runs, in the report's order.
    pub fn all(&self) -> impl Iterator<Item = Option<&Runs>> {
        [Some(&self.plain), Some(&self.ring)].into_iter().chain(self.others.iter().map(Option::as_ref))
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
    /// The limit of the link for the first metric.
    pub limit: Option<f64>,
    /// What went wrong, if it did.
    pub failed: Option<String>,
    /// What went wrong with other accelerators: their names, and why.
    pub lost: Vec<(String, String)>,
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
    /// The names of all variants.
    pub variants: Vec<String>,
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

/// Another accelerator that has failed at so many points is not tried any more.
const PATIENCE: usize = 3;

/// What is measured with what, and how often.
pub struct Series<'a> {
    lab: &'a Lab,
    link: &'a Link<'a>,
    variants: &'a [Variant],
    rounds: usize,
    /// Points at which each variant has failed.
    failures: Vec<usize>,
}

impl<'a> Series<'a> {
    /// Plain and preloaded runs come first in `variants`.
    pub fn new(lab: &'a Lab, link: &'a Link<'a>, variants: &'a [Variant], rounds: usize) -> Series<'a> {
        Series { lab, link, variants, rounds, failures: vec![0; variants.len()] }
    }

    fn point(&mut self, e: &Experiment, at: usize, tick: &mut dyn FnMut(&str)) -> Row {
        let p = &e.points[at];
        let limit = self.link.limit(e.limit, p.size);
        let mut row = Row { x: p.x.clone(), cells: vec![], share: None, limit, failed: None, lost: vec![] };
        let mut runs: Vec<Vec<Sample>> = self.variants.iter().map(|_| Vec::new()).collect();
        for _ in 0..self.rounds {
            for (i, v) in self.variants.iter().enumerate() {
                tick(&format!("{} {} {}", e.name, p.x, v.name));
                let other = i > 1;
                if row.failed.is_some() || self.failures[i] >= PATIENCE || row.lost.iter().any(|l| l.0 == v.name) {
                    continue;
                }
                match self.lab.run(e, at, v) {
                    Ok(s) => runs[i].push(s),
                    // Another accelerator's failure says nothing of ours.
                    Err(why) if other => {
                        self.failures[i] += 1;
                        row.lost.push((v.name.clone(), why));
                        runs[i].clear();
                    }
                    Err(why) => row.failed = Some(format!("{}: {why}", v.name)),
                }
            }
        }
        if row.failed.is_some() {
            return row;
        }
        for m in e.metrics.iter().chain(&[CPU_MSG, CPU_SERVER, CPU_GB]) {
            let of = |r: &[Sample]| Runs::new(r.iter().filter_map(|s| number(s, m.key)).collect());
            if let (Some(plain), Some(ring)) = (of(&runs[0]), of(&runs[1])) {
                let others = runs[2..].iter().map(|r| of(r)).collect();
                row.cells.push(Cell { metric: *m, plain, ring, others });
            }
        }
        let shares: Vec<f64> = runs[1].iter().map(|s| s.ring as f64 / (s.ring + s.tcp).max(1) as f64).collect();
        row.share = Runs::new(shares).map(|r| r.median);
        row
    }

    /// Measures an experiment; `tick` is called before each run with what is about to be run.
    pub fn experiment(&mut self, e: &Experiment, tick: &mut dyn FnMut(&str)) -> Outcome {
        let rows = (0..e.points.len()).map(|i| self.point(e, i, tick)).collect();
        let metrics = e.metrics.iter().chain(&[CPU_MSG]).copied().collect();
        let variants = self.variants.iter().map(|v| v.name.clone()).collect();
        Outcome { name: e.name, title: e.title.clone(), what: e.what, axis: e.axis, metrics, variants, rows }
    }
}

impl Outcome {
    /// For the report's data.
    pub fn json(&self) -> Value {
        let cell = |c: &Cell| {
            let mut v = json!({
                "metric": c.metric.key, "label": c.metric.label, "more_is_better": c.metric.more,
                "verdict": c.verdict().text(),
            });
            for (name, r) in self.variants.iter().zip(c.all()) {
                v[name] = r.map_or(Value::Null, Runs::json);
            }
            v
        };
        let row = |r: &Row| {
            let lost: Vec<Value> = r.lost.iter().map(|(v, why)| json!({ "variant": v, "why": why })).collect();
            json!({
                "x": r.x, "results": r.cells.iter().map(cell).collect::<Vec<_>>(),
                "share_on_rings": r.share, "limit": r.limit, "failed": r.failed, "lost": lost,
            })
        };
        json!({
            "name": self.name, "title": self.title, "what": self.what, "axis": self.axis, "variants": self.variants,
            "points": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

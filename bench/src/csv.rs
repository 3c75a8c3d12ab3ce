//! The report as comma-separated values: a line for each metric of each point.

use crate::measure::Outcome;

fn quoted(s: &str) -> String {
    if s.contains([',', '"', '\n']) {
        format!("\"{}\"", s.replace('"', "\"\""))
    } else {
        s.to_string()
    }
}

/// All of it; every variant has three columns.
pub fn text(all: &[Outcome]) -> String {
    let names = all.first().map_or(&[][..], |o| &o.variants);
    let mut out = String::from("experiment,point,metric,");
    for n in names {
        out += &format!("{n}_median,{n}_low,{n}_high,");
    }
    out += "verdict,share_on_rings,limit,failed\n";
    for o in all {
        for r in &o.rows {
            let ends = |limit: Option<f64>| {
                let n = |v: Option<f64>| v.map_or(String::new(), |x| format!("{x:.4}"));
                format!("{},{},{}", n(r.share), n(limit), quoted(r.failed.as_deref().unwrap_or("")))
            };
            if r.cells.is_empty() {
                out += &format!("{},{},,{},{}\n", o.name, quoted(&r.x), ",,,".repeat(names.len()), ends(None));
            }
            for (i, c) in r.cells.iter().enumerate() {
                out += &format!("{},{},{},", o.name, quoted(&r.x), quoted(c.metric.label));
                for v in c.all() {
                    out += &v.map_or(",,,".into(), |v| format!("{:.4},{:.4},{:.4},", v.median, v.low, v.high));
                }
                out += &format!("{},{}\n", c.verdict().text(), ends(r.limit.filter(|_| i == 0)));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use crate::measure::{Cell, Outcome, Row, CPU_MSG};
    use crate::stats::Runs;

    #[test]
    fn every_line_has_every_column() {
        let runs = || Runs::new(vec![1.0]).unwrap();
        let cell = |others| Cell { metric: CPU_MSG, plain: runs(), ring: runs(), others };
        let row = |cells| Row { x: "1, 2".into(), cells, share: None, limit: None, failed: None, lost: vec![] };
        let rows = vec![row(vec![cell(vec![None])]), row(vec![cell(vec![Some(runs())])]), row(vec![])];
        let variants = ["plain", "preloaded", "rsocket"].map(String::from).to_vec();
        let o = Outcome { name: "a", title: "b".into(), what: "", axis: "", metrics: vec![], variants, rows };
        let text = super::text(&[o]);
        assert_eq!(text.lines().count(), 4);
        for l in text.lines() {
            assert_eq!(l.replace("1, 2", "").matches(',').count(), 15, "{l}");
        }
    }

    #[test]
    fn what_needs_quotes_has_them() {
        assert_eq!(super::quoted("a, \"b\""), "\"a, \"\"b\"\"\"");
        assert_eq!(super::quoted("plain"), "plain");
    }
}

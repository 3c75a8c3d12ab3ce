//! The report as comma-separated values: a line for each metric of each point.

use crate::measure::Outcome;

fn quoted(s: &str) -> String {
    if s.contains([',', '"', '\n']) {
        format!("\"{}\"", s.replace('"', "\"\""))
    } else {
        s.to_string()
    }
}

/// All of it.
pub fn text(all: &[Outcome]) -> String {
    let mut out = String::from(
        "experiment,point,metric,plain_median,plain_low,plain_high,preloaded_median,preloaded_low,preloaded_high,\
         verdict,share_on_rings,shared_memory_limit,failed\n",
    );
    for o in all {
        for r in &o.rows {
            let ends = |limit: Option<f64>| {
                let n = |v: Option<f64>| v.map_or(String::new(), |x| format!("{x:.4}"));
                format!("{},{},{}", n(r.share), n(limit), quoted(r.failed.as_deref().unwrap_or("")))
            };
            if r.cells.is_empty() {
                out += &format!("{},{},,,,,,,,,{}\n", o.name, quoted(&r.x), ends(None));
            }
            for (i, c) in r.cells.iter().enumerate() {
                let (p, q) = (&c.plain, &c.ring);
                let numbers = [p.median, p.low, p.high, q.median, q.low, q.high].map(|x| format!("{x:.4}")).join(",");
                let limit = r.limit.filter(|_| i == 0);
                let verdict = c.verdict().text();
                out += &format!(
                    "{},{},{},{numbers},{verdict},{}\n",
                    o.name,
                    quoted(&r.x),
                    quoted(c.metric.label),
                    ends(limit)
                );
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_needs_quotes_has_them() {
        assert_eq!(super::quoted("a, \"b\""), "\"a, \"\"b\"\"\"");
        assert_eq!(super::quoted("plain"), "plain");
    }
}

//! Medians, spreads, and when two results are called equal.

use serde_json::{json, Value};

/// Median, least and most.
pub fn spread(v: &[f64]) -> (f64, f64, f64) {
    let mut v = v.to_vec();
    v.sort_by(f64::total_cmp);
    (quantile(&v, 0.5), v[0], v[v.len() - 1])
}

/// A quantile of sorted values, interpolated.
fn quantile(v: &[f64], q: f64) -> f64 {
    let at = q * (v.len() - 1) as f64;
    let (low, part) = (at.floor() as usize, at.fract());
    let high = (low + 1).min(v.len() - 1);
    v[low] + (v[high] - v[low]) * part
}

/// The results of one variant in all rounds.
#[derive(Clone, Debug)]
pub struct Runs {
    /// Every round's value.
    pub values: Vec<f64>,
    /// The median.
    pub median: f64,
    /// Where the spread begins: the first quartile, or the least of fewer than five values.
    pub low: f64,
    /// Where it ends.
    pub high: f64,
}

impl Runs {
    /// Of at least one value; `None` of none.
    pub fn new(values: Vec<f64>) -> Option<Runs> {
        let mut v = values.clone();
        v.sort_by(f64::total_cmp);
        let (low, high) = if v.len() < 5 { (0.0, 1.0) } else { (0.25, 0.75) };
        v.first()?;
        Some(Runs { values, median: quantile(&v, 0.5), low: quantile(&v, low), high: quantile(&v, high) })
    }

    /// For the report's data.
    pub fn json(&self) -> Value {
        json!({ "median": self.median, "low": self.low, "high": self.high, "runs": self.values })
    }
}

/// How the preloaded variant compares with the plain one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Verdict {
    /// The spreads overlap.
    Equal,
    /// So many times better.
    Better(f64),
    /// So many times worse.
    Worse(f64),
}

impl Verdict {
    /// Compares; `more` says that more is better.
    pub fn of(plain: &Runs, other: &Runs, more: bool) -> Verdict {
        if plain.low <= other.high && other.low <= plain.high {
            return Verdict::Equal;
        }
        let ratio = if more { other.median / plain.median } else { plain.median / other.median };
        if ratio >= 1.0 {
            Verdict::Better(ratio)
        } else {
            Verdict::Worse(1.0 / ratio)
        }
    }

    /// As a few words.
    pub fn text(self) -> String {
        match self {
            Verdict::Equal => "equal".into(),
            Verdict::Better(r) => format!("{r:.2}x better"),
            Verdict::Worse(r) => format!("{r:.2}x worse"),
        }
    }
}

/// A number with three digits that count.
pub fn short(x: f64) -> String {
    match x.abs() {
        a if a >= 1e9 => format!("{:.2}G", x / 1e9),
        a if a >= 1e6 => format!("{:.2}M", x / 1e6),
        a if a >= 1e4 => format!("{:.1}k", x / 1e3),
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 10.0 => format!("{x:.1}"),
        a if a >= 1.0 || a == 0.0 => format!("{x:.2}"),
        _ => format!("{x:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(v: &[f64]) -> Runs {
        Runs::new(v.to_vec()).unwrap()
    }

    #[test]
    fn what_overlaps_is_equal() {
        assert_eq!(Verdict::of(&runs(&[1.0, 2.0, 3.0]), &runs(&[2.9, 4.0, 5.0]), true), Verdict::Equal);
        assert_eq!(Verdict::of(&runs(&[1.0, 2.0, 3.0]), &runs(&[3.5, 4.0, 5.0]), true), Verdict::Better(2.0));
        assert_eq!(Verdict::of(&runs(&[1.0, 2.0, 3.0]), &runs(&[3.5, 4.0, 5.0]), false), Verdict::Worse(2.0));
        // One outlier among five does not make a spread.
        let calm = runs(&[1.0, 1.1, 1.0, 1.1, 9.0]);
        assert!(calm.high < 2.0 && calm.median == 1.1);
        assert!(Runs::new(vec![]).is_none());
    }

    #[test]
    fn medians() {
        assert_eq!(spread(&[3.0, 1.0, 2.0, 4.0]), (2.5, 1.0, 4.0));
        assert_eq!(runs(&[7.0]).median, 7.0);
    }
}

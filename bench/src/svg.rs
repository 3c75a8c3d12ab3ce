//! Charts as SVG text: grouped bars with their spreads, and a dashed line of limits.

use crate::stats::short;
use std::fmt::Write;

/// A bar: whose it is, median, and where its spread begins and ends.
#[derive(Clone)]
pub struct Bar {
    /// The variant.
    pub name: String,
    /// The median.
    pub mid: f64,
    /// The spread's beginning.
    pub low: f64,
    /// The spread's end.
    pub high: f64,
}

/// One group of bars.
pub struct Group {
    /// Its label below the axis.
    pub label: String,
    /// Plain, preloaded, and others; `None` where there is nothing to show.
    pub bars: Vec<Option<Bar>>,
    /// The limit above it.
    pub limit: Option<f64>,
}

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 42.0;

/// Text that may stand in HTML and SVG.
pub fn escape(s: &str) -> String {
    s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The vertical scale.
struct Scale {
    log: bool,
    low: f64,
    high: f64,
}

impl Scale {
    /// Linear from zero, or logarithmic where the values differ by more than thirty times.
    fn of(values: impl Iterator<Item = f64> + Clone) -> Scale {
        let high = values.clone().fold(0.0, f64::max).max(1e-9);
        let low = values.filter(|v| *v > 0.0).fold(high, f64::min);
        if high / low > 30.0 {
            return Scale { log: true, low: 10f64.powf(low.log10().floor()), high: 10f64.powf(high.log10().ceil()) };
        }
        let step = Self::step(high);
        Scale { log: false, low: 0.0, high: (high / step).ceil() * step }
    }

    /// A round fifth of a range or so.
    fn step(high: f64) -> f64 {
        let base = 10f64.powf((high / 4.0).log10().floor());
        [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * base).into_iter().find(|s| high / s <= 5.0).unwrap_or(base * 10.0)
    }

    fn y(&self, v: f64) -> f64 {
        let part = if self.log {
            (v.max(self.low).log10() - self.low.log10()) / (self.high.log10() - self.low.log10()).max(1e-9)
        } else {
            v / self.high
        };
        HEIGHT - BOTTOM - part.clamp(0.0, 1.0) * (HEIGHT - TOP - BOTTOM)
    }

    fn ticks(&self) -> Vec<f64> {
        if !self.log {
            let step = Self::step(self.high);
            return (0..).map(|i| f64::from(i) * step).take_while(|v| *v <= self.high * 1.001).collect();
        }
        let (a, b) = (self.low.log10().round() as i32, self.high.log10().round() as i32);
        (a..=b).map(|e| 10f64.powi(e)).collect()
    }
}

/// A chart; `title` says what the bars are.
pub fn chart(title: &str, axis: &str, groups: &[Group]) -> String {
    let values = groups.iter().flat_map(|g| g.bars.iter().flatten().flat_map(|b| [b.mid, b.high]).chain(g.limit));
    let scale = Scale::of(values);
    let mut s = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\"><title>{0}</title>\
         <text class=\"t\" x=\"6\" y=\"16\">{0}{1}</text>",
        escape(title),
        if scale.log { " (logarithmic)" } else { "" }
    );
    let right = WIDTH - RIGHT;
    for t in scale.ticks() {
        let y = scale.y(t);
        let _ = write!(
            s,
            "<line class=\"g\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"a\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 5.0,
            y + 4.0,
            short(t)
        );
    }
    let slot = (right - LEFT) / groups.len().max(1) as f64;
    let many = groups.iter().map(|g| g.bars.len()).max().unwrap_or(0).max(2) as f64;
    let wide = (slot * 0.64 / many).min(46.0);
    let mut limits = Vec::new();
    for (i, g) in groups.iter().enumerate() {
        let mid = LEFT + (i as f64 + 0.5) * slot;
        for (k, b) in g.bars.iter().enumerate().filter_map(|(k, b)| Some((k, b.as_ref()?))) {
            let x = mid + (k as f64 - many / 2.0) * wide;
            let (y, base) = (scale.y(b.mid), HEIGHT - BOTTOM);
            let c = x + wide / 2.0;
            let _ = write!(
                s,
                "<rect class=\"b{k}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{}: {} \
                 ({} to {})</title></rect><line class=\"w\" x1=\"{c:.1}\" x2=\"{c:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
                x + 1.0,
                wide - 2.0,
                (base - y).max(0.5),
                escape(&b.name),
                short(b.mid),
                short(b.low),
                short(b.high),
                scale.y(b.low),
                scale.y(b.high),
            );
        }
        if let Some(l) = g.limit {
            limits.push(format!(
                "{:.1},{y:.1} {:.1},{y:.1}",
                mid - wide * many / 2.0,
                mid + wide * many / 2.0,
                y = scale.y(l)
            ));
        }
        let _ = write!(
            s,
            "<text class=\"a\" x=\"{mid:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - BOTTOM + 16.0,
            escape(&g.label)
        );
    }
    if !limits.is_empty() {
        let _ = write!(s, "<polyline class=\"l\" points=\"{}\"/>", limits.join(" "));
    }
    let _ = write!(
        s,
        "<line class=\"x\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{0}\" y2=\"{0}\"/>\
         <text class=\"a\" x=\"{1:.1}\" y=\"{2}\" text-anchor=\"middle\">{3}</text></svg>",
        HEIGHT - BOTTOM,
        (LEFT + right) / 2.0,
        HEIGHT - 8.0,
        escape(axis)
    );
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(mid: f64) -> Bar {
        Bar { name: "plain".into(), mid, low: mid * 0.9, high: mid * 1.1 }
    }

    #[test]
    fn scales() {
        let s = Scale::of([10.0, 20.0].into_iter());
        assert!(!s.log && s.high == 20.0 && s.ticks().len() >= 4, "{:?}", s.ticks());
        let s = Scale::of([1.0, 5000.0].into_iter());
        assert!(s.log && s.ticks() == [1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        // Nothing at all, and zeros, still make a chart.
        assert!(Scale::of([0.0, 0.0].into_iter()).y(0.0).is_finite());
    }

    #[test]
    fn a_chart_is_well_formed() {
        let group =
            |l: &str| Group { label: l.into(), bars: vec![Some(bar(3.0)), Some(bar(9.0)), None], limit: Some(20.0) };
        let s = chart("a < b & c", "\"x\"", &[group("1"), group("2")]);
        assert_eq!(s.matches("<rect").count(), 4);
        assert!(s.contains("a &lt; b &amp; c") && s.contains("&quot;x&quot;") && s.ends_with("</svg>"));
        assert!(!s.contains("NaN") && !s.contains("inf"));
        assert!(chart("", "", &[]).ends_with("</svg>"));
    }
}

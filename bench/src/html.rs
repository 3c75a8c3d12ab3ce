//! The report: one page, with everything in it and nothing to load.

use crate::measure::{Cell, Outcome, Row};
use crate::stats::{short, Runs, Verdict};
use crate::svg::{chart, escape, Bar, Group};
use serde_json::Value;
use std::fmt::Write;

const STYLE: &str = "
:root{--fg:#1c2126;--bg:#fff;--soft:#5b6670;--line:#d9dee3;--plain:#8b98a5;--ring:#1769aa;--limit:#c2571a;--o2:#7a5af5;--o3:#0e9384;--o4:#b54708;--good:#18794e;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--fg:#e6e9ec;--bg:#14181c;--soft:#9aa5b1;--line:#333b43;--plain:#74818d;--ring:#4aa3e8;--limit:#f08c4b;--o2:#a48afb;--o3:#2ed3b7;--o4:#f7b27a;--good:#4cc38a;--bad:#ff7b72}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2.4rem 0 .2rem}p{margin:.3rem 0 .8rem}.s{color:var(--soft)}
.c{display:flex;flex-wrap:wrap;gap:.6rem}svg{max-width:100%;height:auto}
svg text{fill:var(--fg);font:12px system-ui,sans-serif}svg .t{font-weight:600}svg .a{fill:var(--soft)}
svg .g{stroke:var(--line)}svg .x{stroke:var(--soft)}svg .w{stroke:var(--fg);stroke-width:1.4}
svg .b0{fill:var(--plain)}svg .b1{fill:var(--ring)}svg .b2{fill:var(--o2)}svg .b3{fill:var(--o3)}svg .b4{fill:var(--o4)}svg .l{fill:none;stroke:var(--limit);stroke-width:1.6;stroke-dasharray:5 4}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin:.4rem 0}
td,th{padding:.18rem .6rem;border-bottom:1px solid var(--line);text-align:right}td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}.k{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}
.scroll{overflow-x:auto}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;font-size:14px}dt{color:var(--soft)}dd{margin:0}
";

fn class(v: Verdict) -> &'static str {
    match v {
        Verdict::Equal => "s",
        Verdict::Better(_) => "good",
        Verdict::Worse(_) => "bad",
    }
}

fn cell(c: &Cell, first: &str, rows: usize) -> String {
    let side = |r: &Runs| format!("{} <span class=\"s\">({}–{})</span>", short(r.median), short(r.low), short(r.high));
    let head = if first.is_empty() { String::new() } else { format!("<td rowspan=\"{rows}\">{}</td>", escape(first)) };
    let (plain, ring, verdict) = (side(&c.plain), side(&c.ring), c.verdict());
    let mut s = format!("<tr>{head}<td>{}</td><td>{plain}</td><td>{ring}</td>", escape(c.metric.label));
    s += &format!("<td class=\"{}\">{}</td>", class(verdict), verdict.text());
    for o in &c.others {
        s += &o.as_ref().map_or("<td>–</td>".into(), |r| {
            let v = c.versus(r);
            format!("<td>{} <span class=\"{}\">{}</span></td>", side(r), class(v), v.text())
        });
    }
    s
}

fn row(r: &Row, columns: usize) -> String {
    if let Some(why) = &r.failed {
        return format!(
            "<tr><td>{}</td><td class=\"bad\" colspan=\"{columns}\">{}</td></tr>",
            escape(&r.x),
            escape(why)
        );
    }
    let mut s = String::new();
    for (i, c) in r.cells.iter().enumerate() {
        s += &cell(c, if i == 0 { &r.x } else { "" }, r.cells.len());
        if i == 0 {
            let share = r.share.map_or("–".into(), |x| format!("{:.1} %", x * 100.0));
            let limit = r.limit.map_or("–".into(), short);
            let _ = write!(s, "<td rowspan=\"{0}\">{share}</td><td rowspan=\"{0}\">{limit}</td>", r.cells.len());
        }
        s += "</tr>";
    }
    for (name, why) in &r.lost {
        let _ = write!(
            s,
            "<tr><td></td><td class=\"s\" colspan=\"{columns}\">{} failed: {}</td></tr>",
            escape(name),
            escape(why)
        );
    }
    s
}

/// One experiment: its charts and its table.
fn section(o: &Outcome) -> String {
    let mut s = format!("<h2 id=\"{}\">{}</h2><p class=\"s\">{}</p>", o.name, escape(&o.title), escape(o.what));
    s += "<div class=\"c\">";
    for (i, m) in o.metrics.iter().enumerate() {
        let groups: Vec<Group> = o
            .rows
            .iter()
            .filter_map(|r| {
                let c = r.cells.iter().find(|c| c.metric.key == m.key)?;
                let bar = |(name, r): (&String, Option<&Runs>)| {
                    r.map(|r| Bar { name: name.clone(), mid: r.median, low: r.low, high: r.high })
                };
                let limit = r.limit.filter(|_| i == 0);
                Some(Group { label: r.x.clone(), bars: o.variants.iter().zip(c.all()).map(bar).collect(), limit })
            })
            .collect();
        if !groups.is_empty() {
            let better = if m.more { "more is better" } else { "less is better" };
            s += &chart(&format!("{}, {better}", m.label), o.axis, &groups);
        }
    }
    s += "</div><div class=\"scroll\"><table><tr><th></th><th>metric</th><th>plain</th><th>preloaded</th><th>ringsock is</th>";
    let others = o.variants.get(2..).unwrap_or(&[]);
    others.iter().for_each(|v| s += &format!("<th>{}</th>", escape(v)));
    s += "<th>on rings</th><th>limit</th></tr>";
    o.rows.iter().for_each(|r| s += &row(r, 6 + others.len()));
    s + "</table></div>"
}

/// The first metric of every point, in one table.
fn overview(all: &[Outcome]) -> String {
    let mut counts = [0; 4];
    for r in all.iter().flat_map(|o| &o.rows) {
        match (&r.failed, r.cells.first().map(Cell::verdict)) {
            (Some(_), _) | (_, None) => counts[3] += 1,
            (_, Some(Verdict::Better(_))) => counts[0] += 1,
            (_, Some(Verdict::Equal)) => counts[1] += 1,
            (_, Some(Verdict::Worse(_))) => counts[2] += 1,
        }
    }
    let [better, equal, worse, failed] = counts;
    let mut s = format!(
        "<p>Of {} points, by their first metric: <b class=\"good\">{better} better</b>, {equal} equal within the \
         spread, <b class=\"{}\">{worse} worse</b>",
        better + equal + worse + failed,
        if worse > 0 { "bad" } else { "s" }
    );
    if failed > 0 {
        let _ = write!(s, ", <b class=\"bad\">{failed} failed</b>");
    }
    s + ".</p>"
}

/// What a host is, as a list.
fn facts(title: &str, machine: &Value) -> String {
    let mut s = if title.is_empty() { String::new() } else { format!("<h3>{}</h3>", escape(title)) };
    s += "<dl>";
    for (k, v) in machine.as_object().into_iter().flatten() {
        let text = match v {
            Value::String(t) => t.clone(),
            Value::Array(a) if a.is_empty() => "none".into(),
            Value::Array(a) => a.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "),
            Value::Object(_) => continue,
            other => other.to_string(),
        };
        let _ = write!(s, "<dt>{}</dt><dd>{}</dd>", escape(&k.replace('_', " ")), escape(&text));
    }
    s + "</dl>"
}

/// The whole page; `notes` are lines about what could not be run.
pub fn page(machine: &Value, all: &[Outcome], notes: &[String]) -> String {
    let mut s = String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>");
    s +=
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><link rel=\"icon\" href=\"data:,\"/>";
    let _ = write!(s, "<title>ringsock bench</title><style>{STYLE}</style></head><body><h1>ringsock bench</h1>");
    s += "<p class=\"s\">The same unmodified programs on kernel TCP and with libringsock.so preloaded, in turn. Bars \
          are medians, whiskers the spread of the rounds (quartiles from five rounds on). What differs by less than \
          the spreads is called equal. Processor time is that of all processes of a run, from start to end.</p><p>";
    let names = all.first().map_or(&[][..], |o| &o.variants);
    for (name, color) in names.iter().zip(["plain", "ring", "o2", "o3", "o4"]) {
        let _ = write!(s, "<span class=\"k\" style=\"background:var(--{color})\"></span>{}", escape(name));
    }
    let limit = machine["limit"].as_str().unwrap_or("");
    let _ = write!(s, "<span class=\"k\" style=\"background:var(--limit)\"></span>limit: {}</p>", escape(limit));
    s += &overview(all);
    s += &facts("", machine);
    if machine["peer"].is_object() {
        s += &facts("The other host, where the servers ran", &machine["peer"]);
    }
    for n in notes {
        let _ = write!(s, "<p class=\"s\">Not run: {}</p>", escape(n));
    }
    all.iter().for_each(|o| s += &section(o));
    s + "</body></html>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::CPU_MSG;
    use crate::stats::Runs;

    fn runs(v: f64) -> Runs {
        Runs::new(vec![v, v * 1.01]).unwrap()
    }

    /// Every element that is opened is closed, in order: the page is XML but for its first line.
    fn well_formed(page: &str) {
        let mut open: Vec<&str> = Vec::new();
        let body = page.split_once('\n').unwrap().1;
        let mut rest = body;
        while let Some(i) = rest.find('<') {
            let j = i + rest[i..].find('>').expect("a tag that ends");
            let tag = &rest[i + 1..j];
            rest = &rest[j + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "near {:?}", &rest[..rest.len().min(60)]);
            } else if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().unwrap());
            }
        }
        assert!(open.is_empty(), "still open: {open:?}");
    }

    #[test]
    fn the_page_is_whole_and_loads_nothing() {
        let cell = |p: f64, r: f64| Cell { metric: CPU_MSG, plain: runs(p), ring: runs(r), others: vec![None] };
        let row = |x: &str, cells, failed: Option<&str>| Row {
            x: x.into(),
            cells,
            share: Some(0.995),
            limit: Some(0.5),
            failed: failed.map(str::to_string),
            lost: vec![("rsocket".into(), "<hung>".into())],
        };
        let o = Outcome {
            name: "a",
            title: "A <b> & c".into(),
            what: "w",
            axis: "x",
            metrics: vec![CPU_MSG],
            variants: ["plain", "preloaded", "rsocket"].map(String::from).to_vec(),
            rows: vec![
                row("1 B", vec![cell(4.0, 2.0)], None),
                row("2 B", vec![cell(2.0, 4.0)], None),
                row("3 B", vec![], Some("plain: <died>")),
            ],
        };
        let there = serde_json::json!({ "hostname": "other-host" });
        let machine = serde_json::json!({ "cores": 2, "settings": [], "limit": "writes <alone>", "peer": there });
        let page = page(&machine, &[o], &["x: not installed".into()]);
        well_formed(&page);
        for want in [
            "1 better",
            "1 worse",
            "1 failed",
            "99.5 %",
            "&lt;died&gt;",
            "2.00x better",
            "&lt;hung&gt;",
            "other-host",
            "&lt;alone&gt;",
        ] {
            assert!(page.contains(want), "{want}");
        }
        for loads in ["<script", "src=", "http:", "@import", "url("] {
            let page = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!page.contains(loads), "{loads}");
        }
    }
}

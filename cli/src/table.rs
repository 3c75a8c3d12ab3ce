//! Plain text tables.

use crate::state::Reasons;
use std::cmp::Reverse;

/// Columns as wide as their widest cell, two spaces apart; those named in `right` are numbers.
pub fn format(head: &[&str], rows: &[Vec<String>], right: &[&str]) -> String {
    let width = |i: usize| {
        let cells = rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count());
        cells.chain([head.get(i).map_or(0, |h| h.len())]).max().unwrap_or(0)
    };
    let mut out = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (i, cell) in cells.enumerate() {
            let w = width(i);
            if head.get(i).is_some_and(|h| right.contains(h)) {
                text += &format!("{cell:>w$}  ");
            } else {
                text += &format!("{cell:<w$}  ");
            }
        }
        out += text.trim_end();
        out.push('\n');
    };
    line(&mut head.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    out
}

/// How often each reason occurred, one line each, the commonest first, indented by `by`; nothing if there are none.
pub fn reasons(title: &str, reasons: &Reasons, by: usize) -> String {
    let mut all: Vec<(&String, &u64)> = reasons.iter().collect();
    all.sort_by_key(|(why, n)| (Reverse(**n), *why));
    let lines: String = all.iter().map(|(why, n)| format!("{:by$}  {n:>6}  {why}\n", "")).collect();
    if lines.is_empty() {
        lines
    } else {
        format!("{:by$}{title}:\n{lines}", "")
    }
}

/// A byte count for people: `0`, `512 B`, `1.5 KiB`, `20 MiB`.
pub fn bytes(n: u64) -> String {
    if n == 0 {
        return "0".into();
    }
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = "KiB";
    for next in ["MiB", "GiB", "TiB", "PiB", "EiB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if value < 10.0 {
        format!("{value:.1} {unit}")
    } else {
        format!("{value:.0} {unit}")
    }
}

/// Part of a whole in per cent, never rounded up to 100; `-` of nothing.
pub fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".into();
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    format!("{}.{}%", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".to_string(), "10".to_string()], vec!["long".to_string(), "9".to_string()]];
        assert_eq!(format(&["NAME", "N"], &rows, &["N"]), "NAME   N\na     10\nlong   9\n");
    }

    #[test]
    fn numbers_for_people() {
        assert_eq!(bytes(0), "0");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(20 << 20), "20 MiB");
        assert_eq!(bytes(u64::MAX), "16 EiB");
        assert_eq!(share(999_999, 1_000_000), "99.9%");
        assert_eq!(share(1, 1), "100.0%");
        assert_eq!(share(0, 0), "-");
    }
}

//! Instructions of single calls, as valgrind's callgrind counts them.

use std::collections::HashMap;

/// What the calls of a function have cost, with all that it called, in the text that callgrind writes.
pub fn inclusive(text: &str, function: &str) -> u64 {
    // A name is written once, behind a number which stands for it from then on.
    let mut names = HashMap::new();
    let (mut here, mut sum) = (false, 0);
    for line in text.lines() {
        if let Some((key, value)) = line.split_once('=') {
            if let (true, Some((id, name))) = (matches!(key, "fn" | "cfn"), value.split_once(')')) {
                if !name.trim().is_empty() {
                    names.insert(id.to_string(), name.trim().to_string());
                }
                if key == "fn" {
                    here = names.get(id).is_some_and(|n| n == function);
                }
            }
        } else if here && line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            // A place, and what was spent there: by itself, or, behind a line `calls=`, by what it called.
            sum += line.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_function_calls_is_its_own() {
        let text = "events: Ir\n\nob=(1) /bin/x\nfl=(1) a.c\nfn=(1) main\n3 10\ncfn=(2) counted\ncalls=2 7\n4 400\n\n\
                    fn=(2)\n7 20\nfi=(2) b.c\n+2 6\ncob=(2) libc\ncfn=(3) send\ncalls=2 0\n* 374\n\nfn=(3)\n0 374\n";
        assert_eq!(inclusive(text, "counted"), 400);
        assert_eq!(inclusive(text, "main"), 410);
        assert_eq!(inclusive(text, "send"), 374);
        assert_eq!(inclusive(text, "none"), 0);
    }
}

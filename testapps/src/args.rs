//! Command-line options: `--name value` and `--flag`.

use std::collections::HashMap;

/// The options of one subcommand.
#[derive(Clone)]
pub struct Args {
    map: HashMap<String, String>,
}

impl Args {
    /// Reads options; an option that is followed by another, or by nothing, is a flag.
    pub fn parse(words: &[String]) -> Args {
        let mut map = HashMap::new();
        let mut i = 0;
        while i < words.len() {
            let Some(name) = words[i].strip_prefix("--") else {
                die(&format!("unexpected word {:?}", words[i]));
            };
            match words.get(i + 1).filter(|w| !w.starts_with("--")) {
                Some(v) => {
                    map.insert(name.to_string(), v.clone());
                    i += 2;
                }
                None => {
                    map.insert(name.to_string(), String::new());
                    i += 1;
                }
            }
        }
        Args { map }
    }

    /// Whether the flag or option is there.
    pub fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// A text option.
    pub fn text(&self, name: &str, default: &str) -> String {
        self.map.get(name).cloned().unwrap_or_else(|| default.to_string())
    }

    /// A number; `k`, `m` and `g` multiply by powers of 1024.
    pub fn num(&self, name: &str, default: u64) -> u64 {
        let Some(v) = self.map.get(name) else { return default };
        let low = v.to_lowercase();
        let (digits, unit) = match low.char_indices().last() {
            Some((i, 'k')) => (&low[..i], 1 << 10),
            Some((i, 'm')) => (&low[..i], 1 << 20),
            Some((i, 'g')) => (&low[..i], 1 << 30),
            _ => (&low[..], 1),
        };
        match digits.parse::<u64>() {
            Ok(n) => n * unit,
            Err(_) => die(&format!("--{name} wants a number, not {v:?}")),
        }
    }
}

/// Ends the program with a message.
pub fn die(msg: &str) -> ! {
    eprintln!("rs-app: {msg}");
    std::process::exit(2)
}

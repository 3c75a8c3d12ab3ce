//! The columns of a report: in what the same programs differ from run to run.

use std::path::{Path, PathBuf};

/// What is preloaded into the programs of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Preload {
    /// Nothing: kernel TCP.
    Nothing,
    /// `libringsock.so`.
    Rings,
    /// Another accelerator's library.
    Other(PathBuf),
}

/// One column.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// Its name in the report, and on the command line.
    pub name: String,
    /// How it is asked for, on this host or another: each finds its own libraries.
    pub spec: String,
    /// What it preloads here.
    pub preload: Preload,
}

/// Accelerators that have a name of their own, and their libraries.
const KNOWN: [(&str, &str); 2] = [("rsocket", "librspreload.so"), ("smc", "libsmc-preload.so")];

/// Words that mean something else in a report.
const RESERVED: [&str; 6] = ["plain", "preloaded", "metric", "label", "more_is_better", "verdict"];

/// Where a distribution keeps a library that is meant to be preloaded.
fn find(file: &str) -> Option<PathBuf> {
    let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
    let roots = [format!("/usr/lib/{triple}"), "/usr/lib64".into(), "/usr/lib".into(), "/usr/local/lib".into()];
    let places = roots.iter().flat_map(|r| [Path::new(r).join("rsocket"), PathBuf::from(r)]);
    places.map(|d| d.join(file)).find(|p| p.is_file())
}

impl Variant {
    /// The two that every report has, in the order of the runs.
    pub fn both() -> Vec<Variant> {
        let one = |name: &str, preload| Variant { name: name.into(), spec: name.into(), preload };
        vec![one("plain", Preload::Nothing), one("preloaded", Preload::Rings)]
    }

    /// From `plain`, `preloaded`, `rsocket`, `smc` or `NAME=LIBRARY`.
    pub fn parse(spec: &str) -> Result<Variant, String> {
        if let Some(v) = Variant::both().into_iter().find(|v| v.name == spec) {
            return Ok(v);
        }
        let (name, path) = match KNOWN.iter().find(|k| k.0 == spec) {
            Some((name, file)) => (*name, find(file).ok_or(format!("{name}: {file} is not installed"))?),
            None => {
                let (name, path) =
                    spec.split_once('=').ok_or(format!("{spec}: neither rsocket, smc nor NAME=LIBRARY"))?;
                (name, PathBuf::from(path))
            }
        };
        let path = path.canonicalize().map_err(|e| format!("{name}: {}: {e}", path.display()))?;
        if !path.is_file() || path.to_str().is_none_or(|t| t.contains([' ', ':'])) {
            return Err(format!("{name}: {} is not a file that can be preloaded", path.display()));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || !name.chars().all(plain) || RESERVED.contains(&name) {
            return Err(format!("{name}: not a name for a further column"));
        }
        Ok(Variant { name: name.into(), spec: spec.into(), preload: Preload::Other(path) })
    }

    /// Whether its programs have this library, and use the accelerated address.
    pub fn rings(&self) -> bool {
        self.preload == Preload::Rings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_by_name() {
        assert!(Variant::parse("preloaded").unwrap().rings());
        assert_eq!(Variant::parse("plain").unwrap().preload, Preload::Nothing);
        let v = Variant::parse("other=/proc/self/exe").unwrap();
        let exe = std::env::current_exe().unwrap().canonicalize().unwrap();
        assert_eq!((v.name.as_str(), v.preload), ("other", Preload::Other(exe)));
        for bad in ["", "nobody", "x=/nonexistent.so", "plain=/proc/self/exe", "a b=/proc/self/exe", "=/proc/self/exe"]
        {
            assert!(Variant::parse(bad).is_err(), "{bad}");
        }
    }
}

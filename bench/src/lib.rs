//! Measurements of unmodified programs with and without ringsock: workloads, pairs of runs, and
//! the report of `ringsock bench`.

pub mod brokers;
pub mod counts;
pub mod csv;
pub mod html;
mod kid;
pub mod link;
pub mod machine;
pub mod measure;
pub mod pairs;
pub mod peer;
pub mod plan;
pub mod raw;
pub mod services;
mod sock;
pub mod stats;
pub mod svg;
pub mod variant;
pub mod verbs;
pub mod work;

/// Runs one of the programs that are measured, if the words name one: its exit status.
pub fn program(words: &[String]) -> Option<i32> {
    if let Some(code) = ringsock_testapps::load::command(words) {
        return Some(code);
    }
    let first = words.first()?;
    first.starts_with('@').then(|| work::child(words))
}

//! The path switch against a simulated world: every short schedule, many long
//! ones, peers that die and peers that lie.
//!
//! `RINGSOCK_TEST_CASES` sets the number of random schedules,
//! `RINGSOCK_TEST_STATES` the number of states at which a search is cut off.

#[path = "switch/after.rs"]
mod after;
#[path = "switch/ahead.rs"]
mod ahead;
#[path = "switch/direct.rs"]
mod direct;
#[path = "switch/exhaustive.rs"]
mod exhaustive;
#[path = "switch/random.rs"]
mod random;
#[path = "switch/regressions.rs"]
mod regressions;
#[path = "switch/scan.rs"]
mod scan;
#[path = "switch/world.rs"]
mod world;

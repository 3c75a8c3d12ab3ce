//! The core of ringsock.
pub mod ops;
pub mod stats;
pub mod sys;

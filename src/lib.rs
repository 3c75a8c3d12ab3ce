//! The core of ringsock.
pub mod ops;
pub mod sys;

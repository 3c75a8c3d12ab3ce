//! The core of ringsock.
pub mod fdhigh;
pub mod layout;
pub mod ops;
pub mod ring;
pub mod shm;
pub mod side;
pub mod stats;
pub mod switch;
pub mod sync;
pub mod sys;
pub mod wire;

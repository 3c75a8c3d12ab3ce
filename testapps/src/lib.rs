//! What measurements share with `rs-app`: workloads over plain sockets.

pub mod args;
pub mod load;

//! How often a peer on another host is asked for.

use crate::bg::MS;

/// How often for one connection.
pub(super) const MOST: u32 = 22;
/// 64 ms.
const LONGEST: u32 = 6;

/// How long after so many dials, the last of which nobody heard, the next one comes. The peer may be loading its RDMA
/// libraries, and what it moves between their being there and the next dial goes by TCP.
pub(super) fn again_in(dials: u32) -> i64 {
    MS << dials.min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_asked_for_often_and_for_long() {
        let pauses: Vec<i64> = (1..MOST).map(again_in).collect();
        assert!(pauses.is_sorted() && pauses[0] == 2 * MS);
        assert!(pauses.iter().all(|p| *p <= 64 * MS));
        let all: i64 = pauses.iter().sum();
        assert!((1_000 * MS..2_000 * MS).contains(&all), "{} ms", all / MS);
    }
}

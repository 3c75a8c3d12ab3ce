//! What travels on the TCP stream itself: the mark, and after it the frames
//! of the control stream. Pure encoding, no I/O.

/// A secret that the receiver of a direction hands to its sender over the link.
pub type Nonce = [u8; 16];

/// First half of every mark; the nonce is the second.
pub const MARK_MAGIC: [u8; 16] = *b"\xf3ringsock-mark\x8e\x17";
/// Length of a mark in bytes.
pub const MARK_LEN: usize = 32;
/// Length of a frame in bytes.
pub const FRAME_LEN: usize = 24;

const FRAME_MAGIC: [u8; 3] = *b"rs\x01";

/// The mark for `nonce`.
pub fn mark(nonce: &Nonce) -> [u8; MARK_LEN] {
    let mut m = [0; MARK_LEN];
    m[..16].copy_from_slice(&MARK_MAGIC);
    m[16..].copy_from_slice(nonce);
    m
}

/// A message on the control stream. Offsets count the bytes of the current ring, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame {
    /// "I want both directions back on TCP."
    Leave,
    /// "I have consumed `consumed` bytes of your ring and take no more from it."
    Return {
        /// Bytes consumed.
        consumed: u64,
    },
    /// "After this frame come the bytes `from..until` of my ring, then plain TCP."
    Resume {
        /// First replayed byte; what the receiver said in `Return`.
        from: u64,
        /// End of what was ever written into the ring.
        until: u64,
    },
    /// "After this frame come `len` bytes of yours that stood in the TCP stream before your mark. Nobody has read
    /// them: repeat them first."
    Back {
        /// How many.
        len: u64,
    },
}

impl Frame {
    /// The frame as bytes.
    pub fn encode(self) -> [u8; FRAME_LEN] {
        let (kind, a, b) = match self {
            Frame::Leave => (1u8, 0, 0),
            Frame::Return { consumed } => (2, consumed, 0),
            Frame::Resume { from, until } => (3, from, until),
            Frame::Back { len } => (4, len, 0),
        };
        let mut f = [0; FRAME_LEN];
        f[..3].copy_from_slice(&FRAME_MAGIC);
        f[3] = kind;
        f[8..16].copy_from_slice(&a.to_le_bytes());
        f[16..].copy_from_slice(&b.to_le_bytes());
        f
    }

    /// The frame that `bytes` are, or `None` for anything that is not exactly a frame.
    pub fn decode(bytes: &[u8; FRAME_LEN]) -> Option<Frame> {
        let a = u64::from_le_bytes(bytes[8..16].try_into().ok()?);
        let b = u64::from_le_bytes(bytes[16..24].try_into().ok()?);
        let frame = match bytes[3] {
            1 => Frame::Leave,
            2 => Frame::Return { consumed: a },
            3 => Frame::Resume { from: a, until: b },
            4 => Frame::Back { len: a },
            _ => return None,
        };
        (frame.encode() == *bytes).then_some(frame)
    }

    /// Whether `bytes`, of which there are no more than [`FRAME_LEN`], can be the first of a frame.
    pub fn may_begin(bytes: &[u8]) -> bool {
        let mut whole = [0; FRAME_LEN];
        whole[..bytes.len()].copy_from_slice(bytes);
        match bytes.len() {
            FRAME_LEN => Frame::decode(&whole).is_some(),
            n => {
                let magic = n.min(FRAME_MAGIC.len());
                whole[..magic] == FRAME_MAGIC[..magic]
                    && (n <= 3 || (1..=4).contains(&whole[3]))
                    && whole[4..8] == [0; 4]
            }
        }
    }
}

/// What an armed receiver sees at the front of its TCP stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan {
    /// So many bytes are the program's. More than zero.
    App(usize),
    /// The mark stands at the front.
    Mark,
    /// What is there could be the first part of the mark: wait for more.
    Partial,
}

/// Where `byte` stands first. The C library looks at many bytes at a time.
fn find(bytes: &[u8], byte: u8) -> Option<usize> {
    // SAFETY: the memory is readable for its length.
    let at = unsafe { libc::memchr(bytes.as_ptr().cast(), byte.into(), bytes.len()) };
    (!at.is_null()).then(|| at as usize - bytes.as_ptr() as usize)
}

/// Looks for the mark of `nonce` in `window`, the bytes at the front of the TCP stream.
///
/// `begun` says whether the sender may have begun to write its mark. While it
/// is false, a tail that looks like the first part of a mark is the program's
/// own and is not held back: a request that happens to end so must reach a
/// program that will answer it. `begun` must be read after the window was, or
/// a mark that begins in between is taken for the program's. An empty window gives [`Scan::Partial`].
pub fn scan(window: &[u8], nonce: &Nonce, begun: bool) -> Scan {
    let whole = mark(nonce);
    let mut at = 0;
    while let Some(i) = find(&window[at..], whole[0]) {
        at += i;
        let rest = &window[at..];
        let n = rest.len().min(MARK_LEN);
        if rest[..n] == whole[..n] && (n == MARK_LEN || begun) {
            return match (at, n == MARK_LEN) {
                (0, true) => Scan::Mark,
                (0, false) => Scan::Partial,
                (at, _) => Scan::App(at),
            };
        }
        at += 1;
    }
    if window.is_empty() {
        Scan::Partial
    } else {
        Scan::App(window.len())
    }
}

/// As [`scan`], for a sender that says where its mark begins: `from` bytes behind the window's front, if it
/// has begun to write it. Nothing before that is held back.
pub fn scan_from(window: &[u8], nonce: &Nonce, from: Option<usize>) -> Scan {
    match (scan(window, nonce, false), from) {
        (Scan::App(n), Some(from)) if n == window.len() && from < n => match scan(&window[from..], nonce, true) {
            Scan::App(more) => Scan::App(from + more),
            _ if from > 0 => Scan::App(from),
            s => s,
        },
        (s, _) => s,
    }
}

//! What the kernel tells of a set: its items, as `/proc/self/fdinfo` lists them (proc(5)).

use crate::retire::is_filtered;
use crate::sys::{self, sys, SysResult};
use crate::textfile::TextFile;
use core::fmt::Write;
use libc::c_int;

/// An item of the kernel's set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The number under which it was added, by whatever process.
    pub fd: c_int,
    /// Its events, and how they are told.
    pub events: u32,
    /// The program's data.
    pub data: u64,
    /// The inode of the file that was added; 0: an old kernel does not tell.
    pub inode: u64,
}

impl Listed {
    /// Whether it is a one-shot that has fired: that waits for nothing, not even for errors.
    pub fn has_fired(&self) -> bool {
        self.events & !super::NOT_EVENTS == 0
    }

    /// Whether the file that it is in the set `epfd` has its number here. Another process may have added it, where the number
    /// meant another file; and both ends of a pipe, or all eventfds and sets, have an inode together. False also where that
    /// cannot be told.
    pub fn is_there(&self, epfd: c_int) -> bool {
        let Some(s) = stat(self.fd).filter(|s| [0, s.st_ino].contains(&self.inode)) else { return false };
        // A socket has one of its own, and is one file.
        s.st_mode & libc::S_IFMT == libc::S_IFSOCK && self.inode != 0 || is_item(epfd, self.fd)
    }
}

/// Whether the one item that the set `epfd` has under the number `fd` is that file here, as kcmp(2) tells (Linux 4.13).
fn is_item(epfd: c_int, fd: c_int) -> bool {
    const KCMP_EPOLL_TFD: c_int = 7;
    if is_filtered() {
        return false;
    }
    let pid = sys::pid();
    // struct kcmp_epoll_slot: the set, the number, and which of the items that have it (linux/kcmp.h).
    let compare = |which: u32| {
        let slot = [epfd as u32, fd as u32, which];
        // SAFETY: the slot is readable.
        unsafe { sys!(libc::SYS_kcmp, pid, pid, KCMP_EPOLL_TFD, fd, &slot) }
    };
    compare(0) == Ok(0) && compare(1) == Err(libc::ENOENT)
}

/// That of the file `fd`.
pub fn inode(fd: c_int) -> Option<u64> {
    stat(fd).map(|s| s.st_ino)
}

fn stat(fd: c_int) -> Option<libc::stat> {
    // SAFETY: all-zero is one.
    let mut s: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `s` is writable.
    unsafe { sys!(libc::SYS_fstat, fd, &mut s) }.is_ok().then_some(s)
}

/// A set that is described by more than this is too large to be looked at.
const MOST: usize = 64 << 10;

/// Whether `is` holds for any item of the set. `EFBIG`: it has too many. Other errors: there is no such set, or nothing
/// tells of it.
pub fn any_listed(epfd: c_int, is: impl FnMut(Listed) -> bool) -> SysResult<bool> {
    let text = TextFile::read(path(epfd).as_bytes_with_nul(), MOST)?;
    Ok(text.bytes().split(|b| *b == b'\n').filter_map(item).any(is))
}

/// Whether the items of the set can be listed here: not where nothing is mounted at `/proc`.
pub fn can_list(epfd: c_int) -> bool {
    let path = path(epfd);
    // SAFETY: it ends with NUL.
    unsafe { sys!(libc::SYS_faccessat, libc::AT_FDCWD, path.as_bytes_with_nul().as_ptr(), libc::F_OK) }.is_ok()
}

fn path(epfd: c_int) -> crate::config::Text<64> {
    let mut path = crate::config::Text::EMPTY;
    let _ = write!(path, "/proc/self/fdinfo/{epfd}");
    path
}

/// `tfd: 5 events: 19 data: 7d5 pos:0 ino:40e ...`: a decimal number and hexadecimal ones.
fn item(line: &[u8]) -> Option<Listed> {
    let text = core::str::from_utf8(line).ok()?;
    let mut words = text.strip_prefix("tfd:")?.split_ascii_whitespace();
    let fd = words.next()?.parse().ok()?;
    let mut after = |name: &str| words.next().filter(|w| *w == name).and_then(|_| words.next());
    let events = u32::from_str_radix(after("events:")?, 16).ok()?;
    let data = u64::from_str_radix(after("data:")?, 16).ok()?;
    let inode = words.find_map(|w| w.strip_prefix("ino:")).and_then(|w| u64::from_str_radix(w, 16).ok()).unwrap_or(0);
    Some(Listed { fd, events, data, inode })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epoll::kernel_ctl;

    #[test]
    fn items_are_read_as_the_kernel_writes_them() {
        let line = b"tfd:    15006 events: 80000019 data: 2fec7f687283e90e  pos:0 ino:40e sdev:10";
        assert_eq!(
            item(line),
            Some(Listed { fd: 15006, events: 0x8000_0019, data: 0x2fec_7f68_7283_e90e, inode: 0x40e })
        );
        assert_eq!(item(b"flags:\t02000002"), None);
        assert_eq!(item(b"tfd: 5"), None);
        // SAFETY: no preconditions.
        let [ep, fd] =
            [libc::SYS_epoll_create1, libc::SYS_eventfd2].map(|n| unsafe { sys!(n, 0, 0) }.unwrap() as c_int);
        let (events, data) = ((libc::EPOLLIN | libc::EPOLLET) as u32, u64::MAX - 1);
        let ev = libc::epoll_event { events, u64: data };
        kernel_ctl(ep, libc::EPOLL_CTL_ADD, fd, &ev).unwrap();
        let mut all = Vec::new();
        assert!(can_list(ep));
        assert_eq!(any_listed(ep, |i| (all.push(i), false).1), Ok(false));
        let [one] = all[..] else { panic!("{all:?}") };
        assert_eq!((one.fd, one.data, one.events & events), (fd, data, events));
        assert!(one.inode != 0 && one.is_there(ep) && !Listed { inode: one.inode + 1, ..one }.is_there(ep));
        assert!(!Listed { fd: 1 << 20, ..one }.is_there(ep));
        // Another file of the same inode gets the number.
        // SAFETY: no preconditions.
        let [kept, other] =
            [(libc::SYS_dup, fd), (libc::SYS_eventfd2, 0)].map(|(n, a)| unsafe { sys!(n, a, 0) }.unwrap());
        // SAFETY: a number of ours.
        unsafe { sys!(libc::SYS_dup3, other, fd, 0) }.unwrap();
        assert!(!one.is_there(ep));
        [ep, fd, kept as c_int, other as c_int].into_iter().for_each(sys::close);
        // (Their own numbers other tests may have by now.)
        assert_eq!(any_listed(1 << 20, |_| true), Err(libc::ENOENT));
        assert!(!can_list(1 << 20));
    }
}

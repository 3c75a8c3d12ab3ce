//! Directories of `/proc` in which everything is called by a number: fds, threads.

use crate::sys::{self, sys, SysResult};
use libc::c_int;

/// Calls `f` with an fd of the directory `path` and each number that is there. The list of the caller's own fds has that fd, too.
pub fn each_in(path: &core::ffi::CStr, mut f: impl FnMut(c_int, c_int)) -> SysResult<()> {
    // SAFETY: a NUL-terminated path.
    let dir = unsafe {
        sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC)
    }? as c_int;
    let mut buf = [0u64; 256];
    // SAFETY: `buf` is writable for its size.
    let read = |buf: &mut [u64; 256]| unsafe { sys!(libc::SYS_getdents64, dir, buf.as_mut_ptr(), size_of_val(buf)) };
    while let Ok(n @ 1..) = read(&mut buf) {
        // SAFETY: the kernel has written `n` bytes.
        let bytes = unsafe { core::slice::from_raw_parts(buf.as_ptr() as *const u8, n) };
        let mut at = 0;
        // struct linux_dirent64: length at 16, name at 19 (getdents64(2)).
        while at + 19 < n {
            let len = u16::from_ne_bytes([bytes[at + 16], bytes[at + 17]]) as usize;
            let name = bytes[at + 19..].iter().take_while(|b| b.is_ascii_digit());
            let number = name.fold(None, |v, b| Some(v.unwrap_or(0) * 10 + c_int::from(b - b'0')));
            if let Some(number) = number {
                f(dir, number);
            }
            at += len.max(1);
        }
    }
    sys::close_raw(dir);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_fds_and_threads() {
        let (mut fds, mut threads) = (Vec::new(), Vec::new());
        each_in(c"/proc/self/fd", |dir, n| fds.push((dir, n))).unwrap();
        each_in(c"/proc/self/task", |_, n| threads.push(n as u32)).unwrap();
        assert!(fds.iter().any(|(_, n)| *n == 0) && fds.iter().any(|(dir, n)| n == dir));
        assert!(threads.contains(&crate::thread::tid()));
        assert_eq!(each_in(c"/proc/no such", |_, _| ()), Err(libc::ENOENT));
    }
}

//! Small text files, read by raw system calls into memory of our own.

use crate::sys::{sys, SysResult};

/// The bytes of a file, in an anonymous mapping.
pub(crate) struct TextFile {
    at: *mut u8,
    len: usize,
    room: usize,
}

impl TextFile {
    /// Reads a regular file, or one of `/proc`, of at most `most` bytes; `path` is NUL-terminated.
    ///
    /// `EFBIG` if it is larger, `EINVAL` if it is neither.
    pub(crate) fn read(path: &[u8], most: usize) -> SysResult<TextFile> {
        if path.last() != Some(&0) {
            return Err(libc::EINVAL);
        }
        crate::desk::run(|| Self::read_here(path, most))
    }

    fn read_here(path: &[u8], most: usize) -> SysResult<TextFile> {
        // A FIFO would block without O_NONBLOCK.
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
        // SAFETY: `path` ends with NUL, as was just seen.
        let fd = unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0)? };
        let file = Self::read_fd(fd, most);
        crate::sys::close_raw(fd as i32);
        file
    }

    fn read_fd(fd: usize, most: usize) -> SysResult<TextFile> {
        let mut st = core::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: `st` has room for what the kernel writes.
        unsafe { sys!(libc::SYS_fstat, fd, st.as_mut_ptr())? };
        // SAFETY: all zeroes is a valid `stat`, and the kernel has filled it.
        let st = unsafe { st.assume_init() };
        match st.st_mode & libc::S_IFMT {
            libc::S_IFREG => {}
            libc::S_IFDIR => return Err(libc::EISDIR),
            _ => return Err(libc::EINVAL),
        }
        let size = usize::try_from(st.st_size).unwrap_or(usize::MAX);
        if size > most {
            return Err(libc::EFBIG);
        }
        // Files of /proc say that they are empty; one byte more than the size shows the end.
        let room = if size == 0 { most.min(64 << 10) } else { size } + 1;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new private mapping.
        let at = unsafe { sys!(libc::SYS_mmap, 0, room, prot, flags, -1, 0)? } as *mut u8;
        let mut file = TextFile { at, len: 0, room };
        while file.len < room {
            // SAFETY: the rest of the mapping is `room - len` bytes.
            match unsafe { sys!(libc::SYS_read, fd, at as usize + file.len, room - file.len) } {
                Ok(0) => return Ok(file),
                Ok(n) => file.len += n,
                Err(libc::EINTR) => {}
                Err(e) => return Err(e),
            }
        }
        Err(libc::EFBIG)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has at least `len` bytes and lives as long as `self`.
        unsafe { core::slice::from_raw_parts(self.at, self.len) }
    }

    /// Keeps the bytes for good, or until [`free`].
    pub(crate) fn leak(self) -> &'static [u8] {
        // SAFETY: as in `bytes`; the mapping stays because `self` is forgotten.
        let bytes = unsafe { core::slice::from_raw_parts(self.at, self.len) };
        core::mem::forget(self);
        bytes
    }
}

impl Drop for TextFile {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no borrow is left.
        let _ = unsafe { sys!(libc::SYS_munmap, self.at, self.room) };
    }
}

/// Room for `n` values of `T`, all zero bytes, kept for good or until [`free`].
///
/// # Safety
/// All zero bytes must be a valid `T`.
pub(crate) unsafe fn zeroed_slice<T>(n: usize) -> SysResult<&'static mut [T]> {
    if n == 0 {
        return Ok(&mut []);
    }
    let bytes = n.checked_mul(core::mem::size_of::<T>()).ok_or(libc::ENOMEM)?;
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new private mapping.
    let at = unsafe { sys!(libc::SYS_mmap, 0, bytes, prot, flags, -1, 0)? };
    // SAFETY: page aligned, `n` values long, zeroed, ours alone; the caller vouches for zeroes.
    Ok(unsafe { core::slice::from_raw_parts_mut(at as *mut T, n) })
}

/// Gives back what [`TextFile::leak`] or [`zeroed_slice`] returned.
///
/// # Safety
/// Nobody may use the slice any more, and it must come from there.
pub(crate) unsafe fn free<T>(slice: &'static [T]) {
    let bytes = core::mem::size_of_val(slice);
    if bytes > 0 {
        // SAFETY: the caller vouches for it. A mapping's last page goes with any part of it.
        let _ = unsafe { sys!(libc::SYS_munmap, slice.as_ptr(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_is_there() {
        let file = TextFile::read(b"/proc/self/comm\0", 4096).unwrap();
        assert!(file.bytes().ends_with(b"\n"));
        assert_eq!(TextFile::read(b"/proc\0", 4096).err(), Some(libc::EISDIR));
        assert_eq!(TextFile::read(b"/dev/null\0", 4096).err(), Some(libc::EINVAL));
        assert_eq!(TextFile::read(b"/nonexistent\0", 4096).err(), Some(libc::ENOENT));
        assert_eq!(TextFile::read(b"/proc/self/maps\0", 16).err(), Some(libc::EFBIG));
    }
}

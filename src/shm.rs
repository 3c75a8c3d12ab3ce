//! Shared memory: sealed memfds and their mappings.

use crate::signals::Blocked;
use crate::sys::{sys, Errno, SysResult};
use crate::textfile::TextFile;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use libc::c_int;

const F_ADD_SEALS: c_int = 1033;
const F_GET_SEALS: c_int = 1034;
const F_SEAL_SEAL: usize = 1;
const F_SEAL_SHRINK: usize = 2;
const F_SEAL_GROW: usize = 4;
const F_SEAL_FUTURE_WRITE: usize = 16;

/// A mapping of shared memory. Never unmapped by being dropped: who owns it says when.
#[derive(Debug, Clone, Copy)]
pub struct Map {
    /// First byte.
    pub base: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

/// How many bytes are mapped.
static MAPPED: AtomicU64 = AtomicU64::new(0);

/// How many bytes of addresses the library has mapped in this process.
pub fn mapped() -> u64 {
    MAPPED.load(Relaxed)
}

/// A page-aligned length is mapped; anything else is a bug of the caller.
fn mmap(len: usize, prot: c_int, flags: c_int, fd: c_int) -> SysResult<Map> {
    // In a program that has called `mlockall` the kernel makes every page of a new mapping exist, unless it may not be
    // touched, and most of ours are sparse.
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let base = unsafe { sys!(libc::SYS_mmap, 0, len, libc::PROT_NONE, flags, fd as isize, 0) }?;
    MAPPED.fetch_add(len as u64, Relaxed);
    let map = Map { base: base as *mut u8, len };
    // SAFETY: nobody has seen the mapping.
    let usable = unsafe { sys!(libc::SYS_munlock, base, len).and_then(|_| sys!(libc::SYS_mprotect, base, len, prot)) };
    if let Err(e) = usable {
        // SAFETY: as above.
        unsafe { unmap(map) };
        return Err(e);
    }
    Ok(map)
}

/// A soft limit of this process's.
fn limit(of: libc::__rlimit_resource_t) -> u64 {
    let mut r = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `r` is writable.
    let _ = unsafe { sys!(libc::SYS_prlimit64, 0, of, 0, &mut r) };
    r.rlim_cur
}

/// Whether `RLIMIT_FSIZE` lets a file have `len` bytes. A call that goes beyond is answered with a signal that kills.
pub fn may_have(len: usize) -> bool {
    limit(libc::RLIMIT_FSIZE) >= len as u64
}

/// Whether mappings of `len` bytes are little of what `RLIMIT_AS` still lets the program map: an eighth at most.
pub fn is_little(len: usize) -> bool {
    let most = limit(libc::RLIMIT_AS);
    if most == libc::RLIM_INFINITY {
        return true;
    }
    // The first number is the address space in pages.
    let text = TextFile::read(b"/proc/self/statm\0", 4096).ok();
    let pages: Option<u64> = text.and_then(|t| core::str::from_utf8(t.bytes()).ok()?.split(' ').next()?.parse().ok());
    pages.is_some_and(|p| most.saturating_sub(p << 12) / 8 >= len as u64)
}

/// Zeroed memory that a forked child shares with its parent.
pub fn anon_shared(len: usize) -> SysResult<Map> {
    mmap(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
}

/// Zeroed memory of this process alone.
pub fn anon_private(len: usize) -> SysResult<Map> {
    mmap(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
}

/// Gives a mapping back; nothing where there is none.
///
/// # Safety
/// Nothing may use the memory any more.
pub unsafe fn unmap(m: Map) {
    if !m.base.is_null() {
        // SAFETY: the caller's promise.
        if unsafe { sys!(libc::SYS_munmap, m.base, m.len) }.is_ok() {
            MAPPED.fetch_sub(m.len as u64, Relaxed);
        }
    }
}

/// A memfd of `len` bytes, mapped for writing here; whoever else gets the fd
/// can neither resize nor (since Linux 5.1) write it. The fd is close-on-exec.
/// `name` ends with a NUL.
pub fn create_owned(name: &[u8], len: usize) -> SysResult<(c_int, Map)> {
    create(name, len, F_SEAL_FUTURE_WRITE)
}

/// As [`create_owned`], but whoever gets the fd may write it, too.
pub fn create_common(name: &[u8], len: usize) -> SysResult<(c_int, Map)> {
    create(name, len, 0)
}

fn create(name: &[u8], len: usize, seal: usize) -> SysResult<(c_int, Map)> {
    debug_assert_eq!(name.last(), Some(&0));
    // SAFETY: `name` is NUL-terminated.
    let fd =
        unsafe { sys!(libc::SYS_memfd_create, name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) }? as c_int;
    let fd = crate::fdhigh::move_high(fd);
    let made = (|| {
        if !may_have(len) {
            return Err(libc::EFBIG);
        }
        // SAFETY: `fd` is ours.
        unsafe { sys!(libc::SYS_ftruncate, fd, len) }?;
        let map = mmap(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE, fd)?;
        let base = F_SEAL_SHRINK | F_SEAL_GROW;
        // SAFETY: `fd` is ours; kernels without F_SEAL_FUTURE_WRITE refuse it and get the other seals.
        unsafe {
            if sys!(libc::SYS_fcntl, fd, F_ADD_SEALS, base | seal).is_err() {
                sys!(libc::SYS_fcntl, fd, F_ADD_SEALS, base)?;
            }
            sys!(libc::SYS_fcntl, fd, F_ADD_SEALS, F_SEAL_SEAL)?;
            // Core dumps of brokers are large enough.
            let _ = sys!(libc::SYS_madvise, map.base, map.len, libc::MADV_DONTDUMP);
        }
        Ok(map)
    })();
    match made {
        Ok(map) => Ok((fd, map)),
        Err(e) => {
            crate::sys::close(fd);
            Err(e)
        }
    }
}

/// Maps a peer's memfd for reading, after checking that it has `len` bytes and cannot shrink.
pub fn map_peer(fd: c_int, len: usize) -> SysResult<Map> {
    map_foreign(fd, len, libc::PROT_READ)
}

/// As [`map_peer`], for writing as well.
pub fn map_common(fd: c_int, len: usize) -> SysResult<Map> {
    map_foreign(fd, len, libc::PROT_READ | libc::PROT_WRITE)
}

fn map_foreign(fd: c_int, len: usize, prot: c_int) -> SysResult<Map> {
    // SAFETY: a plain query of a descriptor.
    let seals = unsafe { sys!(libc::SYS_fcntl, fd, F_GET_SEALS) }?;
    if seals & F_SEAL_SHRINK == 0 {
        return Err(libc::EPERM);
    }
    // SAFETY: seeking a memfd changes nothing that anybody relies on.
    let size = unsafe { sys!(libc::SYS_lseek, fd, 0, libc::SEEK_END) }?;
    if size < len {
        return Err(libc::EINVAL);
    }
    let map = mmap(len, prot, libc::MAP_SHARED | libc::MAP_NORESERVE, fd)?;
    // SAFETY: advice about our own new mapping.
    let _ = unsafe { sys!(libc::SYS_madvise, map.base, map.len, libc::MADV_DONTDUMP) };
    Ok(map)
}

/// Makes pages exist, so that touching them later cannot fail: out of memory is an error here, not a signal there.
pub fn allocate(fd: c_int, offset: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: `fd` is a memfd of ours.
    let once = || unsafe { sys!(libc::SYS_fallocate, fd, 0, offset, len) }.map(|_| ());
    // Before Linux 6.18 a pending signal ends it, and what was done is taken back (`shmem_fallocate`, mm/shmem.c): where a
    // timer ticks it might never come to its end.
    match once() {
        Err(libc::EINTR) => {
            let _blocked = Blocked::new();
            once()
        }
        r => r,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32};

    static CAME: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: c_int) {
        CAME.fetch_add(1, Relaxed);
    }

    #[test]
    fn signals_do_not_keep_memory_from_being_allocated() {
        const SIZE: usize = 4 << 20;
        // SAFETY: a handler that counts, for a signal that nobody else here uses.
        unsafe { libc::signal(libc::SIGRTMAX() - 3, count as *const () as usize) };
        // SAFETY: asks who this thread is.
        let me = unsafe { libc::pthread_self() };
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Relaxed) {
                    // SAFETY: that thread waits for this one.
                    unsafe { libc::pthread_kill(me, libc::SIGRTMAX() - 3) };
                    std::thread::sleep(std::time::Duration::from_micros(200));
                }
            });
            while CAME.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            let failed = (0..20).find_map(|_| {
                let (fd, map) = create_owned(b"ringsock-test\0", SIZE).expect("a memfd");
                let r = allocate(fd, 0, SIZE);
                // SAFETY: both are ours, and nobody else has seen them.
                unsafe {
                    unmap(map);
                    libc::close(fd);
                }
                r.err()
            });
            over.store(true, Relaxed);
            assert_eq!(failed, None);
        });
    }
}

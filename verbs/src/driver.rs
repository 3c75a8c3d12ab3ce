//! The drivers of this host's devices, loaded before libibverbs looks for them.
//!
//! libibverbs loads every driver that is installed, some twenty libraries, as soon as one device has none yet. What
//! that takes passes before a process has its first link: here only those are loaded that a device's names point to.
//! Where that is not enough, or nothing is found, libibverbs loads them all, as ever.

use core::cell::Cell;
use core::ffi::CStr;
use libc::{c_int, c_void, dl_phdr_info};
use ringsock_core::elf::{Change, Object};
use std::ffi::{CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const CLASS: &str = "/sys/class/infiniband";

/// Loads them. `inside`: a function of libibverbs, beside which they lie.
pub fn load(inside: *const c_void) {
    let Some(folder) = folder_of(inside) else { return };
    for name in chosen(&installed(&folder), &names(Path::new(CLASS))) {
        let Ok(name) = CString::new(folder.join(name).as_os_str().as_bytes()) else { continue };
        // One of another version of libibverbs lacks its symbols, and is not loaded.
        // SAFETY: a NUL-terminated name; a driver's initialiser makes itself known to libibverbs, which would load it too.
        unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    }
}

/// Where the drivers are that belong to a libibverbs.
fn folder_of(inside: *const c_void) -> Option<PathBuf> {
    // SAFETY: `info` is written by dladdr, whose strings live as long as the object.
    let file = unsafe {
        let mut info: libc::Dl_info = core::mem::zeroed();
        if libc::dladdr(inside, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        CStr::from_ptr(info.dli_fname).to_bytes().to_vec()
    };
    Some(Path::new(OsStr::from_bytes(&file)).with_file_name("libibverbs"))
}

fn installed(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
}

/// For each device what its driver may be called after: the device itself, what it says it is, and the kernel's driver.
fn names(class: &Path) -> Vec<[String; 3]> {
    let device = |e: fs::DirEntry| {
        let described = fs::read_to_string(e.path().join("node_desc")).unwrap_or_default();
        let driver = fs::read_link(e.path().join("device/driver")).unwrap_or_default();
        let driver = driver.file_name().unwrap_or_default().to_string_lossy().into_owned();
        [e.file_name().to_string_lossy().into_owned(), described, driver]
    };
    fs::read_dir(class).into_iter().flatten().flatten().map(device).collect()
}

/// The files of the drivers for these devices; none if a device has none, because then all are loaded anyway.
fn chosen<'a>(files: &'a [String], devices: &[[String; 3]]) -> Vec<&'a str> {
    let mut out = Vec::new();
    for names in devices {
        let is_for = |f: &&str| {
            name_of(f).is_some_and(|n| !n.is_empty() && names.iter().any(|d| d.to_ascii_lowercase().starts_with(n)))
        };
        let mut its = files.iter().map(String::as_str).filter(is_for).peekable();
        if its.peek().is_none() {
            return Vec::new();
        }
        out.extend(its);
    }
    out.sort_unstable();
    out.dedup();
    out
}

/// The driver's name in `libNAME-rdmavVERSION.so`.
fn name_of(file: &str) -> Option<&str> {
    file.strip_prefix("lib")?.split_once("-rdmav").map(|(name, _)| name)
}

/// A driver without hardware behind it tells the kernel of what is posted by a `write` to its own device, which is to be a
/// system call and nothing more: ours would look in vain whether that is a connection, and libc's whether the thread is
/// cancelled meanwhile, which it is not (`sys::keeping`). `inside`: a function of the driver; `ours`: one of the library that
/// has its `write` before libc's. If anybody else has, that stays as it is. Returns whether it is so now.
pub fn bind(inside: *const c_void, ours: *const c_void) -> bool {
    let write = libc::write as *const () as usize;
    if home(write as *const c_void) != home(ours) || home(inside).is_null() {
        return false;
    }
    let mut b = Binding {
        driver: home(inside) as usize,
        is: false,
        change: Change { name: c"write", from: write, to: tell as *const () as usize },
    };
    // SAFETY: what is passed on is what `bind_one` takes it for, and outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(bind_one), (&raw mut b).cast()) };
    b.is
}

struct Binding {
    driver: usize,
    is: bool,
    change: Change,
}

/// Where the library lies in which something is.
fn home(inside: *const c_void) -> *const c_void {
    // SAFETY: `info` is written by dladdr.
    unsafe {
        let mut info: libc::Dl_info = core::mem::zeroed();
        if libc::dladdr(inside, &mut info) == 0 {
            return core::ptr::null();
        }
        info.dli_fbase
    }
}

unsafe extern "C" fn bind_one(info: *mut dl_phdr_info, _: usize, b: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker's, and what `bind` gave.
    let (info, b) = unsafe { (&*info, &mut *b.cast::<Binding>()) };
    // SAFETY: it is told of just now.
    if let Some(object) = unsafe { Object::of(info) }.filter(|o| o.begins_at(b.driver)) {
        for r in object.references() {
            // SAFETY: its own, and `tell` has the type of `write`.
            b.is |= unsafe { object.change(r, core::slice::from_ref(&b.change)) };
        }
    }
    0
}

/// `write`, for drivers.
unsafe extern "C" fn tell(fd: c_int, from: *const c_void, n: usize) -> isize {
    // SAFETY: the driver's memory.
    match unsafe { ringsock_core::sys::syscall6(libc::SYS_write, fd as usize, from as usize, n, 0, 0, 0) } {
        Ok(n) => n as isize,
        Err(e) => {
            // SAFETY: the thread's own variable.
            unsafe { WAS.set(core::mem::replace(&mut *libc::__errno_location(), e)) };
            -1
        }
    }
}

thread_local! {
    /// What `errno` was before `tell` changed it.
    static WAS: Cell<c_int> = const { Cell::new(0) };
}

/// Puts `errno` back after a failure.
pub extern "C" fn restore() {
    // SAFETY: the thread's own variable.
    unsafe { *libc::__errno_location() = WAS.get() };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> Vec<String> {
        ["mlx4", "mlx5", "rxe", "siw", "bnxt_re", "irdma"].map(|n| format!("lib{n}-rdmav34.so")).into()
    }

    fn device(name: &str, described: &str, driver: &str) -> [String; 3] {
        [name, described, driver].map(String::from)
    }

    #[test]
    fn only_the_drivers_of_the_devices_are_chosen() {
        let two = [device("mlx5_0", "host HCA-1", "mlx5_core"), device("rxe0", "rxe\n", "")];
        assert_eq!(chosen(&files(), &two), ["libmlx5-rdmav34.so", "librxe-rdmav34.so"]);
    }

    #[test]
    fn a_device_with_another_name_is_known_by_its_driver_or_its_word() {
        assert_eq!(chosen(&files(), &[device("rocep1s0f0", "", "mlx5_core")]), ["libmlx5-rdmav34.so"]);
        assert_eq!(chosen(&files(), &[device("soft", "SIW", "")]), ["libsiw-rdmav34.so"]);
    }

    #[test]
    fn each_is_chosen_once() {
        let two = [device("rxe0", "rxe", ""), device("rxe1", "rxe", "")];
        assert_eq!(chosen(&files(), &two), ["librxe-rdmav34.so"]);
    }

    #[test]
    fn a_device_that_nobody_knows_has_all_loaded_by_libibverbs() {
        let two = [device("rxe0", "rxe", ""), device("new0", "", "new_core")];
        assert!(chosen(&files(), &two).is_empty());
        assert!(chosen(&[String::from("lib-rdmav34.so"), String::from("README")], &[device("rxe0", "", "")]).is_empty());
    }

    #[test]
    fn what_a_driver_writes_is_written() {
        let mut ends = [-1; 2];
        // SAFETY: `ends` has room for two; the buffers are as long as is said.
        unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            assert_eq!(tell(ends[1], b"abc".as_ptr().cast(), 3), 3);
            let mut got = [0u8; 4];
            assert_eq!(libc::read(ends[0], got.as_mut_ptr().cast(), 4), 3);
            assert_eq!(&got[..3], b"abc");
            assert_eq!(tell(-1, b"abc".as_ptr().cast(), 3), -1);
            assert_eq!(*libc::__errno_location(), libc::EBADF);
            *libc::__errno_location() = libc::ENOENT;
            assert_eq!(tell(-1, b"abc".as_ptr().cast(), 3), -1);
            restore();
            assert_eq!(*libc::__errno_location(), libc::ENOENT);
            for fd in ends {
                libc::close(fd);
            }
        }
    }

    #[test]
    fn drivers_lie_beside_the_library_that_a_function_is_in() {
        let here = folder_of(folder_of as fn(*const c_void) -> Option<PathBuf> as *const c_void).expect("this program");
        assert!(here.ends_with("libibverbs"));
        assert!(folder_of(core::ptr::null()).is_none());
    }
}

//! A program that asks for libc by name (`ctypes.CDLL("libc.so.6")`, .NET's P/Invoke, JNA, Java's foreign functions) gets a
//! handle with which `dlsym` finds libc's functions past whatever was preloaded. A connection would be used on both sides
//! then: `poll` here, `recv` there. Where the function is found that one of ours stands before, ours is given.
//!
//! Not seen: `dlvsym`, with which a program asks for a certain version of a function.

use crate::real::{self, keep_errno, Library};
use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};
use libc::{c_char, c_int, c_void};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// What we interpose beside the functions that have a real one of their own in [`real::ALL`].
pub const OTHERS: [&CStr; 6] = [c"dlsym", c"execl", c"execlp", c"execle", c"__vfork", c"__clone"];

/// The version under which every libc has had `dlsym`.
#[cfg(target_arch = "x86_64")]
const VERSION: &CStr = c"GLIBC_2.2.5";
#[cfg(target_arch = "aarch64")]
const VERSION: &CStr = c"GLIBC_2.17";

// -------------------------------------------------------------------- dlsym()

/// The function behind ours.
fn behind() -> *mut c_void {
    static AT: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let mut at = AT.load(Ordering::Relaxed);
    if at.is_null() {
        // SAFETY: names that end with a zero; what is found by that name has that type. RTLD_NEXT means the libraries
        // behind the one that this code is in.
        unsafe {
            at = libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), VERSION.as_ptr());
            if !at.is_null() {
                // Another library may interpose it behind ours; it gives its own no version.
                at = core::mem::transmute::<*mut c_void, Dlsym>(at)(libc::RTLD_NEXT, c"dlsym".as_ptr());
            }
        }
        if at.is_null() {
            return nothing as *mut c_void;
        }
        AT.store(at, Ordering::Relaxed);
    }
    at
}

/// Where there is no `dlsym`.
extern "C" fn nothing(_: *mut c_void, _: *const c_char) -> *mut c_void {
    core::ptr::null_mut()
}

/// What `dlsym` finds without us.
///
/// # Safety
/// The handle is one.
#[inline(never)]
pub unsafe fn found(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let dlsym: Dlsym = core::mem::transmute(behind());
    dlsym(handle, name.as_ptr())
}

/// The function that ours stands before, if there is one.
pub fn next(name: &CStr) -> *mut c_void {
    // SAFETY: a handle that needs no library; it is this code's library that calls.
    unsafe { found(libc::RTLD_NEXT, name) }
}

/// Before `dlsym`: gives the function that is to be called.
unsafe extern "C" fn finder(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let by_order = handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT;
    if !by_order && !name.is_null() {
        // SAFETY: a C string.
        let name = CStr::from_ptr(name);
        if real::ALL.iter().map(|r| r.name()).chain(OTHERS).any(|ours| ours == name) {
            return find as *mut c_void;
        }
    }
    keep_errno(behind)
}

jump! { fn dlsym to finder }

/// `dlsym` of a name that we interpose.
unsafe extern "C" fn find(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let name = CStr::from_ptr(name);
    let there = found(handle, name);
    if there.is_null() {
        return there;
    }
    keep_errno(|| {
        let ours = if is_behind(there, name) { ours(name) } else { core::ptr::null_mut() };
        // What was not found here is nobody's error.
        libc::dlerror();
        if ours.is_null() {
            there
        } else {
            ours
        }
    })
}

/// Whether ours stands before that function. Older libcs have two of some names, in libc and in libpthread.
fn is_behind(function: *mut c_void, name: &CStr) -> bool {
    let next = next(name);
    let libcs = Library::with(Library::libcs());
    let is_libcs = |f: *mut c_void| libcs.iter().any(|l| l.has(f));
    function == next || is_libcs(function) && is_libcs(next)
}

/// Our own function of that name. (The program may have put one of its own before it: what it asks libc for is not that.)
unsafe fn ours(name: &CStr) -> *mut c_void {
    static US: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let mut us = US.load(Ordering::Relaxed);
    if us.is_null() {
        let mut info: libc::Dl_info = core::mem::zeroed();
        if libc::dladdr(find as *const c_void, &mut info) == 0 {
            return us;
        }
        let dlopen: unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void =
            core::mem::transmute(real::dlopen.get());
        us = dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if us.is_null() {
            return us;
        }
        US.store(us, Ordering::Relaxed);
    }
    found(us, name)
}

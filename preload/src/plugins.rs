//! Libraries that a program loads with `RTLD_DEEPBIND` (PHP its extensions, Julia all it loads): the dynamic linker looks for
//! what such a one calls in its own dependencies first, so it finds libc's functions and passes by ours. A connection would
//! be used on both sides then: `poll` here, `recv` there.
//!
//! Once such a library is loaded, and before the program has its handle, its references to what we interpose are bound to
//! us: those only that are bound to libc's function, or are going to be. For all else it stays as the program wants it.
//!
//! Not seen: what its constructors call, and a library that is asked for by its bare name, which libc has to look for as
//! its caller would (that function goes by its caller's address).

use crate::lookup::{self, OTHERS};
use crate::real::{self, keep_errno, Library};
use core::ffi::CStr;
use libc::{c_char, c_int, c_void};
use ringsock_core::elf::{Change, Object};

// ------------------------------------------------------------------- dlopen()

/// Before `dlopen`: gives the function that is to be called.
unsafe extern "C" fn opener(name: *const c_char, flags: c_int) -> usize {
    // SAFETY: a C string, if anything.
    if flags & libc::RTLD_DEEPBIND != 0 && !name.is_null() && CStr::from_ptr(name).to_bytes().contains(&b'/') {
        return open as *const () as usize;
    }
    real::dlopen.get() as usize
}

jump! { fn dlopen to opener }

unsafe extern "C" fn open(name: *const c_char, flags: c_int) -> *mut c_void {
    let at: unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void = core::mem::transmute(real::dlopen.get());
    let handle = at(name, flags);
    if !handle.is_null() {
        keep_errno(|| {
            bind(handle);
            // What was not found above is nobody's error.
            libc::dlerror();
        });
    }
    handle
}

// ------------------------------------------------------------------- binding

/// The beginning of what `dlinfo` gives (`struct link_map`).
#[repr(C)]
struct LinkMap {
    addr: usize,
}

struct Changes {
    list: [Change; real::COUNT + OTHERS.len()],
    n: usize,
    /// The address by which the dynamic linker knows the library. It, and what came with it, stand at the list's end.
    first: usize,
    begun: bool,
}

/// Binds the calls of a library, and of those that came with it.
unsafe fn bind(handle: *mut c_void) {
    let mut map: *const LinkMap = core::ptr::null();
    if libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) != 0 || map.is_null() {
        return;
    }
    let none = Change { name: c"", from: 0, to: 0 };
    let mut c = Changes { list: [none; real::COUNT + OTHERS.len()], n: 0, first: (*map).addr, begun: false };
    let [libc, pthread] = Library::libcs();
    let [us, libcs @ ..] = Library::with([dlopen as *const () as usize, libc, pthread]);
    // All of this before the list is gone through, where the dynamic linker holds a lock.
    for name in real::ALL.iter().map(|r| r.name()).chain(OTHERS) {
        let to = lookup::found(libc::RTLD_DEFAULT, name);
        let from = lookup::found(handle, name);
        // The program may have put a function of its own before ours, or the library one of its own before libc's.
        if us.has(to) && libcs.iter().any(|l| l.has(from)) {
            c.list[c.n] = Change { name, from: from as usize, to: to as usize };
            c.n += 1;
        }
    }
    libc::dl_iterate_phdr(Some(bind_one), (&raw mut c).cast());
}

/// (Two threads that load the same library take turns here: the dynamic linker has a lock.)
unsafe extern "C" fn bind_one(info: *mut libc::dl_phdr_info, _: usize, changes: *mut c_void) -> c_int {
    let (info, c) = (&*info, &mut *changes.cast::<Changes>());
    c.begun |= info.dlpi_addr as usize == c.first;
    if c.begun {
        if let Some(object) = Object::of(info) {
            for r in object.references() {
                object.change(r, &c.list[..c.n]);
            }
        }
    }
    0
}

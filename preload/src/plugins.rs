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
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::{c_char, c_int, c_void};

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

/// A reference to `name` that is bound, or would be, to `from`, is bound to `to`.
#[derive(Clone, Copy)]
struct Change {
    name: &'static CStr,
    from: usize,
    to: usize,
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

// --------------------------------------------------------------- ELF (see elf(5))

/// The beginning of what `dlinfo` gives (`struct link_map`).
#[repr(C)]
struct LinkMap {
    addr: usize,
}

#[repr(C)]
struct Dynamic {
    tag: u64,
    value: usize,
}

#[repr(C)]
struct Reference {
    at: usize,
    info: u64,
    addend: i64,
}

#[cfg(target_arch = "x86_64")]
mod kind {
    pub const POINTER: u32 = 1;
    pub const DATA: u32 = 6;
    pub const CALL: u32 = 7;
}
#[cfg(target_arch = "aarch64")]
mod kind {
    pub const POINTER: u32 = 257;
    pub const DATA: u32 = 1025;
    pub const CALL: u32 = 1026;
}

const DT_PLTRELSZ: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_JMPREL: u64 = 23;

fn page_size() -> usize {
    // SAFETY: no preconditions. It cannot fail.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// A library as it lies in memory.
struct Object {
    base: usize,
    /// Its memory, and the part of it that became read-only when it was bound.
    all: core::ops::Range<usize>,
    sealed: core::ops::Range<usize>,
    symbols: *const libc::Elf64_Sym,
    strings: *const c_char,
    tables: [&'static [Reference]; 2],
}

impl Object {
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Object> {
        let base = info.dlpi_addr as usize;
        let headers = core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
        let range = |h: &libc::Elf64_Phdr| {
            let from = base.wrapping_add(h.p_vaddr as usize);
            from..from.wrapping_add(h.p_memsz as usize)
        };
        let loads = || headers.iter().filter(|h| h.p_type == libc::PT_LOAD).map(range);
        let all = loads().map(|r| r.start).min()?..loads().map(|r| r.end).max()?;
        let sealed = headers.iter().find(|h| h.p_type == libc::PT_GNU_RELRO).map_or(0..0, range);
        // Of a page that holds other things as well nothing was.
        let pages = !(page_size() - 1);
        let sealed = sealed.start & pages..sealed.end & pages;
        let dynamic = headers.iter().find(|h| h.p_type == libc::PT_DYNAMIC).map(range)?;
        let dynamic = core::slice::from_raw_parts(
            dynamic.start as *const Dynamic,
            (dynamic.end - dynamic.start) / size_of::<Dynamic>(),
        );
        let value = |tag| dynamic.iter().take_while(|d| d.tag != 0).find(|d| d.tag == tag).map(|d| d.value);
        // The dynamic linker has made most of these addresses.
        let place = |tag| value(tag).map(|v| if all.contains(&v) { v } else { base.wrapping_add(v) });
        let table = |at, bytes| match (place(at), value(bytes)) {
            (Some(at), Some(bytes)) if all.contains(&at) && all.end - at >= bytes => {
                core::slice::from_raw_parts(at as *const Reference, bytes / size_of::<Reference>())
            }
            _ => &[],
        };
        let tables = [table(DT_JMPREL, DT_PLTRELSZ), table(DT_RELA, DT_RELASZ)];
        let (symbols, strings) = (place(DT_SYMTAB)? as *const libc::Elf64_Sym, place(DT_STRTAB)? as *const c_char);
        Some(Object { base, all, sealed, symbols, strings, tables })
    }

    fn references(&self) -> impl Iterator<Item = &'static Reference> {
        self.tables.into_iter().flatten()
    }

    unsafe fn change(&self, r: &Reference, changes: &[Change]) {
        let (symbol, kind) = ((r.info >> 32) as usize, r.info as u32);
        if symbol == 0 || r.addend != 0 || !matches!(kind, kind::POINTER | kind::DATA | kind::CALL) {
            return;
        }
        let symbol = &*self.symbols.add(symbol);
        if symbol.st_shndx != 0 {
            return;
        }
        let name = CStr::from_ptr(self.strings.add(symbol.st_name as usize));
        let Some(change) = changes.iter().find(|c| c.name == name) else { return };
        let at = self.base.wrapping_add(r.at);
        let slot = &*(at as *const AtomicUsize);
        let now = slot.load(Ordering::Relaxed);
        // A call that is bound when it is made first leads into the library itself until then.
        if now != change.from && !(kind == kind::CALL && self.all.contains(&now)) {
            return;
        }
        let page = (at & !(page_size() - 1)) as *mut c_void;
        let sealed = self.sealed.contains(&at);
        if sealed && libc::mprotect(page, page_size(), libc::PROT_READ | libc::PROT_WRITE) != 0 {
            return;
        }
        slot.store(change.to, Ordering::Relaxed);
        if sealed {
            libc::mprotect(page, page_size(), libc::PROT_READ);
        }
    }
}

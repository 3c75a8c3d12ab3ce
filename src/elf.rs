//! What libraries that lie in memory are bound to (see elf(5)).

use core::ffi::{c_char, c_void, CStr};
use core::sync::atomic::{AtomicUsize, Ordering};

/// A reference to `name` that is bound, or would be, to `from`, is bound to `to`.
#[derive(Clone, Copy)]
pub struct Change {
    /// Of the function.
    pub name: &'static CStr,
    /// Where it is bound to.
    pub from: usize,
    /// Where it is to be bound to.
    pub to: usize,
}

#[repr(C)]
struct Dynamic {
    tag: u64,
    value: usize,
}

/// A reference to a symbol (`Elf64_Rela`).
#[repr(C)]
pub struct Reference {
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
pub struct Object {
    base: usize,
    /// Its memory, and the part of it that became read-only when it was bound.
    all: core::ops::Range<usize>,
    sealed: core::ops::Range<usize>,
    symbols: *const libc::Elf64_Sym,
    strings: *const c_char,
    tables: [&'static [Reference]; 2],
}

impl Object {
    /// The library that `dl_iterate_phdr` tells of.
    ///
    /// # Safety
    /// It must tell of it just now.
    pub unsafe fn of(info: &libc::dl_phdr_info) -> Option<Object> {
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

    /// Whether it is the one that begins there.
    pub fn begins_at(&self, at: usize) -> bool {
        self.all.start == at
    }

    /// Its references to symbols.
    pub fn references(&self) -> impl Iterator<Item = &'static Reference> {
        self.tables.into_iter().flatten()
    }

    /// Changes one that is among `changes`. Returns whether it is as it is to be now.
    ///
    /// # Safety
    /// It must be one of its own, and the functions changed to must be of the same types.
    pub unsafe fn change(&self, r: &Reference, changes: &[Change]) -> bool {
        let (symbol, kind) = ((r.info >> 32) as usize, r.info as u32);
        if symbol == 0 || r.addend != 0 || !matches!(kind, kind::POINTER | kind::DATA | kind::CALL) {
            return false;
        }
        let symbol = &*self.symbols.add(symbol);
        if symbol.st_shndx != 0 {
            return false;
        }
        let name = CStr::from_ptr(self.strings.add(symbol.st_name as usize));
        let Some(change) = changes.iter().find(|c| c.name == name) else { return false };
        let at = self.base.wrapping_add(r.at);
        let slot = &*(at as *const AtomicUsize);
        let now = slot.load(Ordering::Relaxed);
        if now == change.to {
            return true;
        }
        // A call that is bound when it is made first leads into the library itself until then.
        if now != change.from && !(kind == kind::CALL && self.all.contains(&now)) {
            return false;
        }
        let page = (at & !(page_size() - 1)) as *mut c_void;
        let sealed = self.sealed.contains(&at);
        if sealed && libc::mprotect(page, page_size(), libc::PROT_READ | libc::PROT_WRITE) != 0 {
            return false;
        }
        slot.store(change.to, Ordering::Relaxed);
        if sealed {
            libc::mprotect(page, page_size(), libc::PROT_READ);
        }
        true
    }
}

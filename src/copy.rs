//! Copies to and from memory of the program, which may have none where it says so.
//!
//! The kernel answers a bad address with `EFAULT`. To ask it beforehand would take a system call for each transfer. So the
//! bytes are simply copied, by instructions that are known: if one of them faults, [`crate::fault`] goes on behind the copy,
//! which then says so. It has copied some of the bytes by then, or none. Few bytes are copied here; the rest is libc's
//! `memcpy`, which knows the machine; that a thread is in there for us, and on which stack, it has noted in its own words.
//!
//! As long as nobody [stands by](crate::fault::stand_by) a bad address is a fault, as it is for any function of C.

use crate::sys::sys;
use crate::thread::me;
#[cfg(target_arch = "x86_64")]
use crate::thread::Thread;
use core::arch::global_asm;
use core::ffi::c_void;
use core::ops::Range;
#[cfg(target_arch = "x86_64")]
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The program has no such memory, or not for this use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault;

extern "C" {
    /// Copies; 0: it could not.
    fn ringsock_copy(to: *mut u8, from: *const u8, n: usize) -> usize;
    /// Where the above ends, and what it does after a fault.
    static ringsock_copy_end: u8;
    /// The same for processors that have larger registers.
    #[cfg(target_arch = "x86_64")]
    fn ringsock_copy_avx(to: *mut u8, from: *const u8, n: usize) -> usize;
    #[cfg(target_arch = "x86_64")]
    static ringsock_copy_avx_end: u8;
    /// Reads two bytes; 0: it could not.
    fn ringsock_touch(one: *const u8, two: *const u8) -> usize;
    static ringsock_touch_end: u8;
    /// Writes a word and half a word behind it; 0: it could not.
    fn ringsock_put(at: *mut u64, word: u64, half: u32) -> usize;
    static ringsock_put_end: u8;
    fn memcpy(to: *mut c_void, from: *const c_void, n: usize) -> *mut c_void;
}

#[cfg(target_arch = "x86_64")]
type Way = unsafe extern "C" fn(*mut u8, *const u8, usize) -> usize;

/// How this processor copies.
#[cfg(target_arch = "x86_64")]
static WAY: AtomicPtr<()> = AtomicPtr::new(ringsock_copy as *mut ());

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn copied(to: *mut u8, from: *const u8, n: usize) -> usize {
    // SAFETY: one of the two functions above; the caller's promise.
    unsafe { core::mem::transmute::<*mut (), Way>(WAY.load(Relaxed))(to, from, n) }
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn copied(to: *mut u8, from: *const u8, n: usize) -> usize {
    /// Up to here bytes are copied without libc.
    const FEW: usize = 128;
    extern "C" {
        fn ringsock_copy_far(to: *mut u8, from: *const u8, n: usize, copying: *mut usize) -> usize;
    }
    // SAFETY: the caller's promise; the place is the thread's own.
    unsafe {
        match n {
            0..=FEW => ringsock_copy(to, from, n),
            _ => me(|t| ringsock_copy_far(to, from, n, t.copying.as_ptr())),
        }
    }
}

/// Whether no program's memory can lie at this address.
#[inline]
pub fn is_nowhere(at: usize) -> bool {
    !(4096..1 << 56).contains(&at)
}

/// Copies `n` bytes.
///
/// # Safety
/// The side that is not the program's must be valid for `n` bytes, and must not overlap the other one.
#[inline(always)]
pub unsafe fn copy(from: *const u8, to: *mut u8, n: usize) -> Result<(), Fault> {
    // SAFETY: the caller's promise; that there may be no memory on the other side is what the functions are for.
    match unsafe { copied(to, from, n) } {
        0 => Err(Fault),
        _ => Ok(()),
    }
}

/// What lies at a place that the program names.
///
/// # Safety
/// Any bits must be a valid `T`.
#[inline]
pub unsafe fn read<T: Copy>(from: *const T) -> Result<T, Fault> {
    if is_nowhere(from as usize) {
        return Err(Fault);
    }
    let mut value = core::mem::MaybeUninit::<T>::uninit();
    // SAFETY: the value is as long as that, and then holds bits that are valid by the caller's promise.
    unsafe {
        copy(from.cast(), value.as_mut_ptr().cast(), size_of::<T>())?;
        Ok(value.assume_init())
    }
}

/// Whether a word of the program's can be read, also as long as nobody stands by. (Then a system call is made.)
#[inline]
pub fn is_word(at: *const u64) -> bool {
    !is_nowhere(at as usize)
        && (crate::fault::stands_by() || (0..2).all(|half| is_half_word(at.cast::<u32>().wrapping_add(half))))
}

#[cold]
fn is_half_word(at: *const u32) -> bool {
    let (nobody, other) = (0, 0u32);
    let move_waiters = libc::FUTEX_CMP_REQUEUE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: reads the number there, if it can; whatever it is, nobody is woken or moved.
    unsafe { sys!(libc::SYS_futex, at, move_waiters, nobody, nobody, &raw const other, 0) != Err(libc::EFAULT) }
}

/// Writes to a place that the program names.
#[inline]
pub fn write<T: Copy>(to: *mut T, value: T) -> Result<(), Fault> {
    if is_nowhere(to as usize) {
        return Err(Fault);
    }
    // SAFETY: the value is as long as that, and nobody else's.
    unsafe { copy((&raw const value).cast(), to.cast(), size_of::<T>()) }
}

const PAGE: usize = 4096;

/// Whether an array of the program's is there: a byte of each page is looked at. (A copy of it all would have to wait for
/// what the program has just written in other portions.)
#[inline]
pub fn is_there<T>(at: *const T, n: usize) -> bool {
    let (first, all) = (at.cast::<u8>(), n * size_of::<T>());
    let touch = |one, two| {
        // SAFETY: there may be nothing.
        unsafe { ringsock_touch(first.wrapping_add(one), first.wrapping_add(two)) != 0 }
    };
    let between = || all <= PAGE || (PAGE..all).step_by(PAGE).all(|from| touch(from, from));
    all == 0 || !is_nowhere(at as usize) && touch(0, all - 1) && between()
}

/// Writes a word, and half a word behind it.
///
/// # Safety
/// None: there may be no memory.
pub unsafe fn put(at: *mut u64, word: u64, half: u32) -> Result<(), Fault> {
    // SAFETY: that is what the function is for.
    match unsafe { ringsock_put(at, word, half) } {
        0 => Err(Fault),
        _ => Ok(()),
    }
}

/// Whether one that is there, and whose elements' ends the call is to write to, can be written to: such a byte of each page.
/// (Another thread may write to what the call only reads.)
pub fn is_writable<T>(at: *mut T, n: usize) -> bool {
    let all = n * size_of::<T>();
    let same = |from: usize| {
        let byte = at.cast::<u8>().wrapping_add(from);
        // SAFETY: any bits are a byte.
        unsafe { read(byte) }.and_then(|b| write(byte, b)).is_ok()
    };
    (size_of::<T>() - 1..all).step_by(PAGE).all(same) && (all == 0 || same(all - 1))
}

/// Where the code of libc lies, and ours.
static CODE: [[AtomicUsize; 2]; 2] = [const { [const { AtomicUsize::new(0) }; 2] }; 2];
const LIBC: usize = 0;
const OURS: usize = 1;

/// The function that copies what is not little, and one of ours.
pub fn by() -> [usize; 2] {
    [memcpy as *const () as usize, ringsock_copy as *const () as usize]
}

/// What [`by`] gives is in the libraries that lie there.
pub fn lie_in(libraries: [Range<usize>; 2]) {
    for (place, library) in CODE.iter().zip(libraries) {
        place[0].store(library.start, Relaxed);
        place[1].store(library.end, Relaxed);
    }
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx") {
        WAY.store(ringsock_copy_avx as *mut (), Relaxed);
    }
}

fn is_in(library: usize, at: usize) -> bool {
    (CODE[library][0].load(Relaxed)..CODE[library][1].load(Relaxed)).contains(&at)
}

/// Whether it is known where they lie.
pub fn is_known() -> bool {
    CODE.iter().all(|library| library[1].load(Relaxed) != 0)
}

/// The functions that are left at their end, and where they are.
fn near() -> impl Iterator<Item = Range<usize>> {
    [
        ringsock_copy as *const () as usize..(&raw const ringsock_copy_end) as usize,
        #[cfg(target_arch = "x86_64")]
        (ringsock_copy_avx as *const () as usize..(&raw const ringsock_copy_avx_end) as usize),
        ringsock_touch as *const () as usize..(&raw const ringsock_touch_end) as usize,
        ringsock_put as *const () as usize..(&raw const ringsock_put_end) as usize,
    ]
    .into_iter()
}

/// Has a copy of ours fail in which a thread with these registers has had a fault. False: it was none.
///
/// libc's function is left as if it had returned 0. It has put nothing on the stack, which is as it was noted, so there is
/// no register that it would have to put back; and it was called by us.
///
/// # Safety
/// They are a thread's, as the kernel gives them to a handler.
pub(crate) unsafe fn fail(c: &mut libc::mcontext_t) -> bool {
    #[cfg(target_arch = "x86_64")]
    let [pc, sp, result] = [libc::REG_RIP, libc::REG_RSP, libc::REG_RAX].map(|r| &raw mut c.gregs[r as usize]);
    #[cfg(target_arch = "aarch64")]
    let [pc, sp, result] = [&raw mut c.pc, &raw mut c.sp, &raw mut c.regs[0]];
    // SAFETY: registers; and the stack is there, where we have noted that it ends.
    unsafe {
        if let Some(near) = near().find(|near| near.contains(&(*pc as usize))) {
            *pc = near.end as _;
            return true;
        }
        if !is_in(LIBC, *pc as usize) || me(|t| t.copying.get()) != *sp as usize {
            return false;
        }
        #[cfg(target_arch = "x86_64")]
        let (to, after) = (*(*sp as *const usize), *sp + size_of::<usize>() as i64);
        #[cfg(target_arch = "aarch64")]
        let (to, after) = (c.regs[30] as usize, *sp);
        if !is_in(OURS, to) {
            return false;
        }
        (*pc, *sp, *result) = (to as _, after, 0);
    }
    true
}

// What is not little is copied as two pieces, the first and the last bytes, which may overlap: that spares a case for each
// length. The first instruction behind a function is where it goes on after a fault.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .text.ringsock_copy, \"ax\", @progbits",
    ".globl ringsock_copy, ringsock_copy_end, ringsock_copy_avx, ringsock_copy_avx_end",
    ".globl ringsock_touch, ringsock_touch_end, ringsock_put, ringsock_put_end",
    ".hidden ringsock_copy, ringsock_copy_end, ringsock_copy_avx, ringsock_copy_avx_end",
    ".hidden ringsock_touch, ringsock_touch_end, ringsock_put, ringsock_put_end",
    ".type ringsock_copy, @function",
    ".balign 64",
    "ringsock_copy:",
    ".cfi_startproc",
    "cmp rdx, 16",
    "jb 30f",
    "cmp rdx, 32",
    "ja 10f",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + rdx - 16]",
    "movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm1",
    "mov eax, 1",
    "ret",
    "10:",
    "cmp rdx, 64",
    "ja 20f",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups xmm2, [rsi + rdx - 32]",
    "movups xmm3, [rsi + rdx - 16]",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "movups [rdi + rdx - 32], xmm2",
    "movups [rdi + rdx - 16], xmm3",
    "mov eax, 1",
    "ret",
    "20:",
    "cmp rdx, 128",
    "ja ringsock_copy_far",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups xmm2, [rsi + 32]",
    "movups xmm3, [rsi + 48]",
    "movups xmm4, [rsi + rdx - 64]",
    "movups xmm5, [rsi + rdx - 48]",
    "movups xmm6, [rsi + rdx - 32]",
    "movups xmm7, [rsi + rdx - 16]",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "movups [rdi + 32], xmm2",
    "movups [rdi + 48], xmm3",
    "movups [rdi + rdx - 64], xmm4",
    "movups [rdi + rdx - 48], xmm5",
    "movups [rdi + rdx - 32], xmm6",
    "movups [rdi + rdx - 16], xmm7",
    "mov eax, 1",
    "ret",
    "30:",
    "cmp edx, 8",
    "jb 40f",
    "mov rax, [rsi]",
    "mov rcx, [rsi + rdx - 8]",
    "mov [rdi], rax",
    "mov [rdi + rdx - 8], rcx",
    "mov eax, 1",
    "ret",
    "40:",
    "cmp edx, 4",
    "jb 50f",
    "mov eax, [rsi]",
    "mov ecx, [rsi + rdx - 4]",
    "mov [rdi], eax",
    "mov [rdi + rdx - 4], ecx",
    "mov eax, 1",
    "ret",
    "50:",
    "cmp edx, 1",
    "jb 60f",
    "movzx eax, byte ptr [rsi]",
    "je 55f",
    "movzx ecx, word ptr [rsi + rdx - 2]",
    "mov [rdi + rdx - 2], cx",
    "55:",
    "mov [rdi], al",
    "60:",
    "mov eax, 1",
    "ret",
    "ringsock_copy_end:",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size ringsock_copy, . - ringsock_copy",
    ".type ringsock_copy_avx, @function",
    ".balign 64",
    "ringsock_copy_avx:",
    ".cfi_startproc",
    "cmp rdx, 32",
    "jbe ringsock_copy",
    "cmp rdx, 256",
    "ja ringsock_copy_far",
    "cmp rdx, 64",
    "ja 20f",
    "vmovups ymm0, [rsi]",
    "vmovups ymm1, [rsi + rdx - 32]",
    "vmovups [rdi], ymm0",
    "vmovups [rdi + rdx - 32], ymm1",
    "mov eax, 1",
    "vzeroupper",
    "ret",
    "20:",
    "cmp rdx, 128",
    "ja 25f",
    "vmovups ymm0, [rsi]",
    "vmovups ymm1, [rsi + 32]",
    "vmovups ymm2, [rsi + rdx - 64]",
    "vmovups ymm3, [rsi + rdx - 32]",
    "vmovups [rdi], ymm0",
    "vmovups [rdi + 32], ymm1",
    "vmovups [rdi + rdx - 64], ymm2",
    "vmovups [rdi + rdx - 32], ymm3",
    "mov eax, 1",
    "vzeroupper",
    "ret",
    "25:",
    "vmovups ymm0, [rsi]",
    "vmovups ymm1, [rsi + 32]",
    "vmovups ymm2, [rsi + 64]",
    "vmovups ymm3, [rsi + 96]",
    "vmovups ymm4, [rsi + rdx - 128]",
    "vmovups ymm5, [rsi + rdx - 96]",
    "vmovups ymm6, [rsi + rdx - 64]",
    "vmovups ymm7, [rsi + rdx - 32]",
    "vmovups [rdi], ymm0",
    "vmovups [rdi + 32], ymm1",
    "vmovups [rdi + 64], ymm2",
    "vmovups [rdi + 96], ymm3",
    "vmovups [rdi + rdx - 128], ymm4",
    "vmovups [rdi + rdx - 96], ymm5",
    "vmovups [rdi + rdx - 64], ymm6",
    "vmovups [rdi + rdx - 32], ymm7",
    "mov eax, 1",
    "vzeroupper",
    "ret",
    "ringsock_copy_avx_end:",
    "xor eax, eax",
    "vzeroupper",
    "ret",
    ".cfi_endproc",
    ".size ringsock_copy_avx, . - ringsock_copy_avx",
    ".type ringsock_touch, @function",
    ".balign 64",
    "ringsock_touch:",
    ".cfi_startproc",
    "movzx eax, byte ptr [rdi]",
    "movzx eax, byte ptr [rsi]",
    "mov eax, 1",
    "ret",
    "ringsock_touch_end:",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size ringsock_touch, . - ringsock_touch",
    ".type ringsock_put, @function",
    "ringsock_put:",
    ".cfi_startproc",
    "mov [rdi], rsi",
    "mov [rdi + 8], edx",
    "mov eax, 1",
    "ret",
    "ringsock_put_end:",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size ringsock_put, . - ringsock_put",
    // Returns where the bytes went, which is not 0.
    ".type ringsock_copy_far, @function",
    "ringsock_copy_far:",
    ".cfi_startproc",
    "mov rax, qword ptr [rip + ringsock_me@GOTTPOFF]",
    "mov qword ptr fs:[rax + {copying}], rsp",
    "jmp qword ptr [rip + memcpy@GOTPCREL]",
    ".cfi_endproc",
    ".size ringsock_copy_far, . - ringsock_copy_far",
    ".popsection",
    copying = const core::mem::offset_of!(Thread, copying),
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .text.ringsock_copy, \"ax\", @progbits",
    ".globl ringsock_copy, ringsock_copy_end, ringsock_touch, ringsock_touch_end, ringsock_put, ringsock_put_end",
    ".hidden ringsock_copy, ringsock_copy_end, ringsock_touch, ringsock_touch_end, ringsock_put, ringsock_put_end",
    ".globl ringsock_copy_far",
    ".hidden ringsock_copy_far",
    ".type ringsock_copy, @function",
    ".balign 64",
    "ringsock_copy:",
    ".cfi_startproc",
    "add x3, x1, x2",
    "add x4, x0, x2",
    "cmp x2, #16",
    "b.lo 30f",
    "cmp x2, #32",
    "b.hi 10f",
    "ldr q0, [x1]",
    "ldr q1, [x3, #-16]",
    "str q0, [x0]",
    "str q1, [x4, #-16]",
    "mov x0, #1",
    "ret",
    "10:",
    "cmp x2, #64",
    "b.hi 20f",
    "ldp q0, q1, [x1]",
    "ldp q2, q3, [x3, #-32]",
    "stp q0, q1, [x0]",
    "stp q2, q3, [x4, #-32]",
    "mov x0, #1",
    "ret",
    "20:",
    "ldp q0, q1, [x1]",
    "ldp q2, q3, [x1, #32]",
    "ldp q4, q5, [x3, #-64]",
    "ldp q6, q7, [x3, #-32]",
    "stp q0, q1, [x0]",
    "stp q2, q3, [x0, #32]",
    "stp q4, q5, [x4, #-64]",
    "stp q6, q7, [x4, #-32]",
    "mov x0, #1",
    "ret",
    "30:",
    "tbz w2, #3, 40f",
    "ldr x5, [x1]",
    "ldr x6, [x3, #-8]",
    "str x5, [x0]",
    "str x6, [x4, #-8]",
    "mov x0, #1",
    "ret",
    "40:",
    "tbz w2, #2, 50f",
    "ldr w5, [x1]",
    "ldr w6, [x3, #-4]",
    "str w5, [x0]",
    "str w6, [x4, #-4]",
    "mov x0, #1",
    "ret",
    "50:",
    "cbz x2, 60f",
    "ldrb w5, [x1]",
    "tbz w2, #1, 55f",
    "ldrh w6, [x3, #-2]",
    "strh w6, [x4, #-2]",
    "55:",
    "strb w5, [x0]",
    "60:",
    "mov x0, #1",
    "ret",
    "ringsock_copy_end:",
    "mov x0, #0",
    "ret",
    ".cfi_endproc",
    ".size ringsock_copy, . - ringsock_copy",
    ".type ringsock_touch, @function",
    "ringsock_touch:",
    ".cfi_startproc",
    "ldrb w2, [x0]",
    "ldrb w2, [x1]",
    "mov x0, #1",
    "ret",
    "ringsock_touch_end:",
    "mov x0, #0",
    "ret",
    ".cfi_endproc",
    ".size ringsock_touch, . - ringsock_touch",
    ".type ringsock_put, @function",
    "ringsock_put:",
    ".cfi_startproc",
    "str x1, [x0]",
    "str w2, [x0, #8]",
    "mov x0, #1",
    "ret",
    "ringsock_put_end:",
    "mov x0, #0",
    "ret",
    ".cfi_endproc",
    ".size ringsock_put, . - ringsock_put",
    // As above.
    ".type ringsock_copy_far, @function",
    "ringsock_copy_far:",
    ".cfi_startproc",
    "mov x4, sp",
    "str x4, [x3]",
    "b memcpy",
    ".cfi_endproc",
    ".size ringsock_copy_far, . - ringsock_copy_far",
    ".popsection",
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Asked of the kernel, as if nobody stood by.
    #[test]
    fn what_can_be_read_is_known_without_a_fault() {
        let word = 7u64;
        let there = |at: *const u32| is_half_word(at);
        assert!(there((&raw const word).cast()));
        // SAFETY: a new mapping.
        let none = unsafe {
            sys!(libc::SYS_mmap, 0, PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1isize, 0)
        };
        let none = none.unwrap() as *const u32;
        assert!(!there(none) && !there(none.wrapping_add(PAGE / 4 - 1)));
        assert!(!is_word(core::ptr::without_provenance(8)) && is_word(&word));
    }

    /// Every length, by libc and not, at several places in a word, with its surroundings left alone.
    #[test]
    fn every_length_is_copied_and_nothing_else() {
        let from: Vec<u8> = (0..700u32).map(|i| (i * 31 + 7) as u8).collect();
        for round in 0..2 {
            for n in (0..=300).chain([511, 600]) {
                for (a, b) in [(0, 0), (1, 0), (0, 3), (5, 9)] {
                    let mut to = vec![0xee; 700];
                    // SAFETY: `a`, `b` and `n` lie within both.
                    assert_eq!(unsafe { copy(from.as_ptr().add(a), to.as_mut_ptr().add(b), n) }, Ok(()));
                    assert_eq!(to[b..b + n], from[a..a + n], "{n} bytes from {a} to {b}, round {round}");
                    assert!(to[..b].iter().chain(&to[b + n..]).all(|x| *x == 0xee), "{n} bytes from {a} to {b}");
                }
            }
            // From now on in the way that this processor does best.
            lie_in([0..0, 0..0]);
        }
    }
}

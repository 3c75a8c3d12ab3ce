//! What a message has besides its bytes: what `recvmsg` says of it, and what TCP takes no notice of.

use super::*;
use crate::copy;

/// Says what the kernel says; not for a call that fails, of which it says nothing.
pub(super) fn tell_message(m: &mut msghdr, flags: c_int, fd: c_int, conn: Option<&Conn>) {
    if !m.msg_name.is_null() {
        m.msg_namelen = 0;
    }
    m.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
    let room = core::mem::replace(&mut m.msg_controllen, 0);
    let tells = match conn.filter(|c| matches!(c.phase(), Phase::Managed | Phase::Away)) {
        Some(c) => c.inq.load(Relaxed),
        None => sys::sockopt_int(fd, libc::IPPROTO_TCP, libc::TCP_INQ).is_ok_and(|on| on != 0),
    };
    if tells {
        put_unread(m, room, still_unread(fd, conn));
    }
}

/// How many bytes the program has not taken, as `TCP_INQ` has them counted: an end that has come is one more, so that who is
/// told of it asks once more. Source: `tcp_inq_hint` in linux/net/ipv4/tcp.c, where a FIN has its place in the sequence.
fn still_unread(fd: c_int, conn: Option<&Conn>) -> c_int {
    let in_kernel = || sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0);
    let Some(c) = conn else { return in_kernel() + c_int::from(kernel_has_fin(fd, None)) };
    if c.rx_lock.held_by_me() || c.tx_lock.held_by_me() {
        return in_kernel();
    }
    // The number is not closed under these.
    let mut b = c.lock_both();
    if !c.is_at(fd) {
        return 0;
    }
    let n = unread(&mut b.rx) as c_int;
    let over = match b.rx.path() {
        RxPath::Tcp => kernel_has_fin(fd, conn),
        // An end of TCP's stands behind what is repeated there, or comes instead of the mark.
        RxPath::Replay | RxPath::Armed | RxPath::Draining => c.has_fin() || kernel_has_fin(fd, conn),
        // A close has no other end than TCP's, of which the kernel may know before we have looked.
        _ => c.has_fin() || c.has_closed_properly() && sys::poll_now(fd, libc::POLLRDHUP) != 0,
    };
    n + c_int::from(over)
}

/// Whether the kernel has received a FIN. It says so to a look that takes nothing.
fn kernel_has_fin(fd: c_int, conn: Option<&Conn>) -> bool {
    let there = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0);
    // An error that is told to the look is kept for the program, but where nothing keeps it.
    if there == 0 && conn.is_none() && sys::poll_now(fd, 0) & libc::POLLERR != 0 {
        return false;
    }
    // SAFETY: all-zero is one.
    let (mut told, mut m): (Unread, msghdr) = unsafe { core::mem::zeroed() };
    m.msg_control = (&raw mut told).cast();
    m.msg_controllen = size_of::<Unread>() as _;
    // SAFETY: the header points at as much memory of ours as it says.
    match unsafe { sys!(libc::SYS_recvmsg, fd, &mut m, libc::MSG_PEEK | libc::MSG_DONTWAIT) } {
        Ok(_) => m.msg_controllen > 0 && told.n > there,
        Err(e) => {
            conn.into_iter().for_each(|c| c.note_lost(e));
            false
        }
    }
}

/// Control data with the number.
#[repr(C)]
struct Unread {
    header: libc::cmsghdr,
    n: c_int,
}

/// As much of it as there is room for. Source: `put_cmsg` in linux/net/core/scm.c.
fn put_unread(m: &mut msghdr, room: usize, n: c_int) {
    // SAFETY: sums of constants.
    let (whole, space) = unsafe { (libc::CMSG_LEN(4) as usize, libc::CMSG_SPACE(4) as usize) };
    let fits = whole.min(room);
    if fits < whole {
        m.msg_flags |= libc::MSG_CTRUNC;
    }
    if m.msg_control.is_null() || room < size_of::<libc::cmsghdr>() {
        m.msg_flags |= libc::MSG_CTRUNC;
        return;
    }
    // SAFETY: all-zero is one.
    let mut told = Unread { header: unsafe { core::mem::zeroed() }, n };
    told.header.cmsg_len = fits as _;
    told.header.cmsg_level = libc::IPPROTO_TCP;
    told.header.cmsg_type = libc::TCP_INQ;
    // SAFETY: no more than there is of it; to where the program has said that there is room.
    if unsafe { copy::copy((&raw const told).cast(), m.msg_control.cast(), fits) }.is_ok() {
        m.msg_controllen = space.min(room) as _;
    }
}

/// Whether TCP takes no notice of the control data of a message that is sent (PulseAudio, for one, sends its credentials whatever
/// the socket is). Source: `sock_cmsg_send` in linux/net/core/sock.c.
pub(super) fn is_ignored(m: &msghdr) -> bool {
    const HEAD: usize = size_of::<libc::cmsghdr>();
    // The kernel refuses much more than that.
    const MOST: usize = 2048;
    let (mut at, mut left) = (m.msg_control as usize, m.msg_controllen);
    while (HEAD..=MOST).contains(&left) {
        // SAFETY: there may be nothing, which is found out.
        let Ok(c) = (unsafe { copy::read(at as *const libc::cmsghdr) }) else { return false };
        let len = c.cmsg_len;
        let has_meaning =
            c.cmsg_level == libc::SOL_SOCKET && !matches!(c.cmsg_type, libc::SCM_RIGHTS | libc::SCM_CREDENTIALS);
        if !(HEAD..=left).contains(&len) || has_meaning {
            return false;
        }
        let step = len.next_multiple_of(size_of::<usize>());
        (at, left) = (at.wrapping_add(step), left.saturating_sub(step));
    }
    left < HEAD
}

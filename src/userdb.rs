//! Names of users and groups, from `/etc/passwd` and `/etc/group` alone.
//!
//! libc's look-ups allocate, take locks and may talk to directory services
//! over sockets, so they are not for a library that sits below all that.

use crate::config::parse_number;
use crate::textfile::TextFile;

/// Largest file that is looked into, in bytes.
const MOST: usize = 16 << 20;

/// Whether this could be a name at all.
pub(crate) fn is_name(name: &[u8]) -> bool {
    !name.is_empty()
        && !name.starts_with(b"-")
        && name.iter().all(|b| b.is_ascii_alphanumeric() || b"_.-$\\@+".contains(b) || !b.is_ascii())
}

/// The id of a user.
pub(crate) fn uid_of(name: &[u8]) -> Option<u32> {
    uid_in(TextFile::read(b"/etc/passwd\0", MOST).ok()?.bytes(), name)
}

/// The id of a group; `member` is called with the id of each member that the group lists.
pub(crate) fn group(name: &[u8], member: impl FnMut(u32)) -> Option<u32> {
    let groups = TextFile::read(b"/etc/group\0", MOST).ok()?;
    let users = TextFile::read(b"/etc/passwd\0", MOST).ok();
    group_in(groups.bytes(), users.as_ref().map_or(&b""[..], TextFile::bytes), name, member)
}

fn uid_in(passwd: &[u8], name: &[u8]) -> Option<u32> {
    id(entry(passwd, name)?.nth(1)?)
}

fn group_in(groups: &[u8], passwd: &[u8], name: &[u8], mut member: impl FnMut(u32)) -> Option<u32> {
    let mut fields = entry(groups, name)?;
    let gid = id(fields.nth(1)?)?;
    let members = fields.next().unwrap_or(&[]);
    members.split(|&b| b == b',').filter_map(|m| uid_in(passwd, m.trim_ascii())).for_each(&mut member);
    Some(gid)
}

/// The fields after the name, of the line that begins with it.
fn entry<'a>(file: &'a [u8], name: &[u8]) -> Option<impl Iterator<Item = &'a [u8]>> {
    if name.is_empty() {
        return None;
    }
    let line = file.split(|&b| b == b'\n').find_map(|l| l.strip_prefix(name)?.strip_prefix(b":"))?;
    Some(line.split(|&b| b == b':'))
}

fn id(field: &[u8]) -> Option<u32> {
    parse_number(field, 0, u64::from(u32::MAX)).map(|n| n as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\nalice:x:1001:100::/:/bin/sh\nbob:x:1002:100::/:/bin/sh\n";
    const GROUP: &[u8] = b"root:x:0:\nbrokers:x:500:alice,nobody-here,bob\nempty:x:501\n";

    #[test]
    fn users() {
        assert_eq!(uid_in(PASSWD, b"alice"), Some(1001));
        assert_eq!(uid_in(PASSWD, b"alic"), None);
        assert_eq!(uid_in(PASSWD, b""), None);
        assert_eq!(uid_of(b"root"), Some(0));
    }

    #[test]
    fn groups_with_their_members() {
        let mut seen = vec![];
        assert_eq!(group_in(GROUP, PASSWD, b"brokers", |u| seen.push(u)), Some(500));
        assert_eq!(seen, [1001, 1002]);
        assert_eq!(group_in(GROUP, PASSWD, b"empty", |_| ()), Some(501));
        assert_eq!(group_in(GROUP, PASSWD, b"none", |_| ()), None);
    }

    #[test]
    fn names() {
        assert!(is_name(b"www-data") && is_name(b"_x.y$"));
        assert!(!is_name(b"") && !is_name(b"-x") && !is_name(b"a b") && !is_name(b"a:b") && !is_name(b"../x"));
    }
}

//! What a certificate says of itself.

use std::{net::IpAddr, path::Path, time::Duration};

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use x509_parser::{
    extensions::GeneralName,
    prelude::{FromDer, X509Certificate},
    time::ASN1Time,
};

use super::{TlsError, development};

/// What the log says of the certificate that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The host names and addresses that it is good for.
    pub names: Vec<String>,
    /// The last second of its life.
    pub not_after: Timestamp,
    /// Made by Tollgate, now or at an earlier start: no client trusts it that was not told to.
    pub development: bool,
}

impl Certificate {
    /// How long it lives from `now` on; zero once it has expired.
    pub fn expires_in(&self, now: Timestamp) -> Duration {
        Duration::try_from(self.not_after.duration_since(now)).unwrap_or(Duration::ZERO)
    }
}

/// What there is to say about the certificate in `path`, and whether it may be served at `now`.
pub(super) fn describe(
    der: &CertificateDer<'_>,
    path: &Path,
    now: Timestamp,
) -> Result<Certificate, TlsError> {
    let (_, leaf) =
        X509Certificate::from_der(der).map_err(|source| TlsError::Malformed { path: path.into(), source })?;
    let not_before = timestamp(leaf.validity().not_before);
    let not_after = timestamp(leaf.validity().not_after);
    let development =
        leaf.issuer().iter_common_name().any(|name| name.as_str() == Ok(development::AUTHORITY));
    if now > not_after {
        return Err(TlsError::Expired { path: path.into(), at: not_after, development });
    }
    if now < not_before {
        return Err(TlsError::NotYetValid { path: path.into(), from: not_before });
    }
    Ok(Certificate { names: names(&leaf), not_after, development })
}

/// "No end", which certificates write as the last second of the year 9999, is a few hours more than a timestamp holds.
fn timestamp(time: ASN1Time) -> Timestamp {
    let limit = if time.timestamp() < 0 { Timestamp::MIN } else { Timestamp::MAX };
    Timestamp::from_second(time.timestamp()).unwrap_or(limit)
}

fn names(leaf: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(extension)) = leaf.subject_alternative_name() else { return Vec::new() };
    let name = |general: &GeneralName<'_>| match general {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => address(bytes).map(|address| address.to_string()),
        _ => None,
    };
    extension.value.general_names.iter().filter_map(name).collect()
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_year_9999_is_no_error() {
        let time = ASN1Time::from_timestamp(253_402_300_799).unwrap();
        assert_eq!(timestamp(time), Timestamp::MAX);
    }

    #[test]
    fn the_rest_of_a_life_never_is_negative() {
        let not_after: Timestamp = "2030-01-08T00:00:00Z".parse().unwrap();
        let certificate = Certificate { names: Vec::new(), not_after, development: false };
        assert_eq!(
            certificate.expires_in("2030-01-01T00:00:00Z".parse().unwrap()),
            Duration::from_secs(7 * 86_400)
        );
        assert_eq!(certificate.expires_in("2031-01-01T00:00:00Z".parse().unwrap()), Duration::ZERO);
    }
}

// Lets the keyboard scroll what is too wide.
{
  const reach = () => {
    for (const box of document.querySelectorAll("article pre, .table-wrapper, p:has(> img)")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  };
  addEventListener("resize", reach);
  reach();
}
